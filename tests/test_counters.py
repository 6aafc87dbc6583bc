"""The profiler's output as text: no profiler is needed to read it."""

import pytest
import torch

from vitkit.lab import counters

HEADER = (
    '"ID","Process ID","Process Name","Host Name","Kernel Name","Context","Stream","Block Size","Grid Size","Device",'
    '"CC","Section Name","Metric Name","Metric Unit","Metric Value"'
)
SAMPLE = f"""==PROF== Connected to process 71
==PROF== Profiling "_kernel" - 0: 0%....50%....100% - 2 passes
some line that the program printed, "quoted"
==PROF== Disconnected from process 71
{HEADER}
"0","71","python3","127.0.0.1","_kernel","1","7","(128, 1, 1)","(43691, 1, 1)","0","9.0","Command line profiler metrics","dram__bytes_read.sum","byte","160,432,128"
"0","71","python3","127.0.0.1","_kernel","1","7","(128, 1, 1)","(43691, 1, 1)","0","9.0","Command line profiler metrics","dram__bytes_write.sum","Mbyte","150.9"
"0","71","python3","127.0.0.1","_kernel","1","7","(128, 1, 1)","(43691, 1, 1)","0","9.0","Command line profiler metrics","lts__t_sectors_srcunit_tex_op_read.sum","sector","5,013,504"
"0","71","python3","127.0.0.1","_kernel","1","7","(128, 1, 1)","(43691, 1, 1)","0","9.0","Command line profiler metrics","lts__t_sectors_srcunit_tex_op_write.sum","sector","n/a"
"1","71","python3","127.0.0.1","_kernel","1","7","(128, 1, 1)","(43691, 1, 1)","0","9.0","Command line profiler metrics","dram__bytes_read.sum","byte","7"
"1","71","python3","127.0.0.1","_kernel","1","7","(128, 1, 1)","(43691, 1, 1)","0","9.0","Command line profiler metrics","another.sum","byte","9"
"""  # noqa: E501


def test_the_csv_is_read_and_noise_is_passed_over():
    first, second = counters.parse(SAMPLE)
    assert first == {
        "dram__bytes_read.sum": 160_432_128,
        "dram__bytes_write.sum": 150.9e6,
        "lts__t_sectors_srcunit_tex_op_read.sum": 5_013_504,
    }
    assert second == {"dram__bytes_read.sum": 7}


@pytest.mark.parametrize("text", ["", "==ERROR== ERR_NVGPUCTRPERM - no permission\n", HEADER, f"{HEADER}\n" + '"0","7'])
def test_what_holds_no_value_gives_none(text):
    assert counters.parse(text) == []


def test_a_table_beside_what_is_needed():
    counted = [counters.needed(dim, from_pos, 16) for dim, from_pos, _ in counters.launches()]
    counted[0] = {metric: 2 * value for metric, value in counted[0].items()}
    df = counters.table(counted, 16)
    assert len(df) == 4 * len(counters.launches()) and df["measured / needed"].tolist()[:5] == [2, 2, 2, 2, 1]
    assert df.impl.tolist()[::4][:4] == ["triton", "triton_in_place", "triton_from_pos", "triton_from_pos_in_place"]
    q_and_k = 2 * 32_768 * 16 * 72 * 2
    assert df.needed.tolist()[:4] == [
        q_and_k + 32_768 * 72 * 4,
        q_and_k,
        (q_and_k + 32_768 * 72 * 4) / 32,
        q_and_k / 32,
    ]
    compact = counters.compact(df)
    assert compact.shape == (8, 6) and compact.iloc[0, 2:].tolist() == [2, 2, 2, 2]


def test_without_a_profiler_it_says_why(monkeypatch):
    assert counters.count("cpu", 16)[0] is None and "NVIDIA" in counters.count("cpu", 16)[1]
    monkeypatch.setattr(counters.shutil, "which", lambda name: None)
    df, why = counters.count("cuda:0", 16)
    assert df is None and ("ncu" in why or torch.version.hip)


def test_a_profiler_without_permission_fails_nothing(monkeypatch):
    monkeypatch.setattr(counters.shutil, "which", lambda name: name)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.version, "hip", None)
    said = "==PROF== Connected to process 7\n==ERROR== ERR_NVGPUCTRPERM - no permission (see there)\n"
    done = counters.subprocess.CompletedProcess([], 1, said, "")
    monkeypatch.setattr(counters.subprocess, "run", lambda *args, **options: done)
    df, why = counters.count("cuda:0", 16)
    assert df is None and "0 of 8 launches (ERR_NVGPUCTRPERM" in why and "\n" not in why

    def late(*args, **options):
        raise counters.subprocess.TimeoutExpired("ncu", 1)

    monkeypatch.setattr(counters.subprocess, "run", late)
    assert counters.count("cuda:0", 16) == (None, "no hardware counters: TimeoutExpired")
