"""An accelerated tower computes what transformers' does, from the same weights, for whatever a caller hands it."""

import copy
import pickle

import numpy as np
import pytest
import torch
from tower_models import ALL, GRIDS, KINDS, accelerate, batch, error, make, outputs

import vitkit
from vitkit.models import PARTS, attention, restore_, window_kernels
from vitkit.models import tower as module

transformers = pytest.importorskip("transformers")


@pytest.fixture(params=KINDS)
def tower(request):
    return make(request.param)


@pytest.mark.parametrize("parts", [*([part] for part in PARTS if part not in ("graph", "windows")), ALL, "auto", ()])
def test_equal_to_transformers(tower, parts):
    for grid in GRIDS:
        pixels, table = batch(grid, tower)
        with torch.no_grad():
            exact = outputs(tower, pixels, table)
            with accelerate(tower, parts) as fast:
                assert fast is tower
                for _ in range(2):
                    assert error(outputs(fast, pixels, table), exact) < 2e-6
            assert all(map(torch.equal, outputs(tower, pixels, table), exact))  # undone: to the bit


def test_norms_in_the_towers(tower, monkeypatch):
    monkeypatch.setattr(module, "FUSED_ON", ("cpu", "cuda"))  # under Triton's interpreter, which is slow
    monkeypatch.setattr(module, "FUSED_DTYPES", (torch.float32,))  # windows too
    launched, launch = [], window_kernels.rotate_and_attend
    monkeypatch.setattr(window_kernels, "rotate_and_attend", lambda *args: launched.append(1) or launch(*args))
    pixels, grid = batch([[1, 4, 4]], tower)
    with torch.no_grad():
        exact = outputs(tower, pixels, grid)
        for parts in (ALL, ["norms"], ["plan", "norms", "mlp"], ["plan", "norms"]):
            with accelerate(tower, parts):
                assert error(outputs(tower, pixels, grid), exact) < 2e-6
        assert len(launched) == (len(tower.blocks) - 1 if hasattr(tower, "fullatt_block_indexes") else 0)
        with accelerate(tower):
            seen = []
            handle = tower.blocks[0].register_forward_hook(lambda *_: seen.append(1))
            assert error(outputs(tower, pixels, grid), exact) < 2e-6 and seen == [1]
            handle.remove()
            hidden = tower(pixels, grid, output_hidden_states=True).hidden_states
    with torch.no_grad():
        assert error(hidden, tower(pixels, grid, output_hidden_states=True).hidden_states) < 2e-6


def test_the_parts_are_really_used(tower, monkeypatch):
    used = []

    def counted(name, function):
        def call(*args, **kwargs):
            used.append(name)
            return function(*args, **kwargs)

        return call

    monkeypatch.setattr(attention, "apply_rotary_qk", counted("rotary", attention.apply_rotary_qk))
    monkeypatch.setattr(module.VisionPlan, "from_grid", counted("plan", vitkit.VisionPlan.from_grid))
    monkeypatch.setattr(attention, "attend", counted("attention", attention.attend))
    monkeypatch.setattr(module.padding.Padded, "hidden", counted("mlp", module.padding.Padded.hidden))
    monkeypatch.setattr(module.torch.nn.functional, "conv3d", counted("conv3d", torch.nn.functional.conv3d))
    with accelerate(tower), torch.no_grad():
        tower(*batch(GRIDS[1], tower))
    gated = hasattr(tower.blocks[0].mlp, "gate_proj")
    wanted = {"plan", "rotary", "attention", "mlp"} if gated else {"plan", "rotary", "attention"}
    assert set(used) == wanted and used.count("rotary") == used.count("attention") == len(tower.blocks)


def test_what_a_caller_may_ask_for(tower):
    pixels, grid = batch(GRIDS[1], tower)
    with torch.no_grad():
        exact = tower(pixels, grid, output_hidden_states=True)
        with accelerate(tower):
            mine = tower(pixels, grid, output_hidden_states=True)
            assert type(mine) is type(exact) and len(mine.hidden_states) == len(exact.hidden_states)
            assert error(mine.hidden_states, exact.hidden_states) < 2e-6
            assert isinstance(tower(pixels, grid, return_dict=False), tuple)
            assert type(tower(pixels, grid)) is type(exact)
            assert error(outputs(tower, pixels, grid.tolist()), exact[:2]) < 2e-6
            assert error(outputs(tower, pixels, grid.numpy()), exact[:2]) < 2e-6
            plan = vitkit.VisionPlan.from_grid(grid, vitkit.Geometry.from_config(tower.config))
            assert error(outputs(tower, pixels, grid, **plan.model_kwargs()), exact[:2]) < 2e-6
            with torch.inference_mode():
                assert error(outputs(tower, pixels, grid), exact[:2]) < 2e-6
            with torch.autocast("cpu", torch.bfloat16):
                rough = outputs(tower, pixels, grid)
        with torch.autocast("cpu", torch.bfloat16):
            allowed = error(outputs(tower, pixels, grid), exact[:2])
    assert error(rough, exact[:2]) < 1.5 * allowed


def test_hooks_on_modules_still_see_their_modules(tower, monkeypatch):
    seen = []
    pixels, grid = batch(GRIDS[0], tower)
    block = tower.blocks[1]
    inner = [block.attn.qkv, block.norm1, block.norm2, *(m for m in block.mlp.children()), tower.patch_embed.proj]
    monkeypatch.setattr(module, "FUSED_ON", ("cpu", "cuda"))  # under Triton's interpreter; hooks keep it away
    for each in (tower, block, block.attn, block.mlp, tower.patch_embed, *inner):
        each.register_forward_hook(lambda m, *_: seen.append(m))
    with accelerate(tower), torch.no_grad():
        tower(pixels, grid)
    assert len(seen) == 5 + len(inner) and seen[-1] is tower


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_no_further_from_float32_than_the_original(tower, dtype):
    pixels, grid = batch(GRIDS[1], tower)
    low = copy.deepcopy(tower)
    low = low.to(dtype)
    low.rotary_pos_emb.inv_freq = tower.rotary_pos_emb.inv_freq
    with torch.no_grad():
        exact = outputs(tower, pixels, grid)
        theirs = error(outputs(low, pixels.to(dtype), grid), exact)
        with accelerate(low):
            mine = error(outputs(low, pixels.to(dtype), grid), exact)
    assert mine <= 1.1 * theirs  # few entries, so a wider margin than for the published towers


def test_a_deep_copy_is_a_tower_of_its_own(tower):
    pixels, grid = batch(GRIDS[0], tower)
    with torch.no_grad():
        with accelerate(tower):
            exact = outputs(tower, pixels, grid)
            other = copy.deepcopy(tower)
            for p in tower.parameters():
                p.zero_()
            assert error(outputs(other, pixels, grid), exact) < 2e-6
        restore_(other)
        assert error(outputs(other, pixels, grid), exact) < 2e-6
        assert not any("forward" in each.__dict__ for each in other.modules())
    pickle.loads(pickle.dumps(other))


def test_for_good_and_back(tower):
    pixels, grid = batch(GRIDS[0], tower)
    with torch.no_grad():
        exact = outputs(tower, pixels, grid)
        assert vitkit.accelerate_(tower, ALL) is tower
        assert error(outputs(tower, pixels, grid), exact) < 2e-6
        with pytest.raises(ValueError, match="accelerated already"):
            vitkit.accelerate_(tower)
        assert restore_(tower) is tower and restore_(tower) is tower
        assert all(map(torch.equal, outputs(tower, pixels, grid), exact))


def test_what_is_refused(tower):
    pixels, grid = batch(GRIDS[0], tower)
    before = set(tower.__dict__)
    for parts, said in (("fast", "'fast'.*'auto'"), (["plan", "flash"], "'flash'.*plan, embed"), (3, "3.*plan, embed")):
        with pytest.raises(ValueError, match=said):
            vitkit.accelerate_(tower, parts)
    with pytest.raises(ValueError, match="graph.*plan and attention"):
        vitkit.accelerate_(tower, ["graph", "plan"])
    with pytest.raises(ValueError, match="windows.*plan and rotary and attention"):
        vitkit.accelerate_(tower, ["plan", "rotary", "windows"])
    for other in (torch.nn.Linear(2, 2), None, tower.blocks[0]):
        with pytest.raises(ValueError, match="tower is a .*Qwen2_5_VisionTransformerPretrainedModel.*5.17"):
            vitkit.accelerate_(other)
    for each in (tower, tower.blocks[1].mlp):
        each.forward = each.forward
        with pytest.raises(ValueError, match=f"{type(each).__name__}.*forward of its own"):
            vitkit.accelerate_(tower)
        del each.forward
    assert set(tower.__dict__) == before
    with accelerate(tower), torch.no_grad():
        with pytest.raises(ValueError, match=rf"{len(pixels) - 4} patches.*{len(pixels)}"):
            tower(pixels[4:], grid)
        with pytest.raises(ValueError, match="grid_thw"):
            tower(pixels, [[1, 7, 8]])


def test_another_version_of_transformers_is_refused(tower, monkeypatch):
    monkeypatch.setattr(transformers, "__version__", "5.16.1")
    with pytest.raises(ValueError, match="transformers is 5.16.1.*5.17 or later"):
        vitkit.accelerate_(tower)


def test_a_model_is_told_where_its_tower_is():
    class Model(torch.nn.Module):
        def get_image_features(self):
            pass

    with pytest.raises(ValueError, match=r"\.visual"):
        vitkit.accelerate_(Model())


def test_compiled_blocks(tower):
    pixels, grid = batch(GRIDS[0], tower)
    for block in tower.blocks:
        block.compile(backend="eager")
    with torch.no_grad():
        exact = type(tower).forward(tower, pixels, grid)
        with accelerate(tower):
            assert error(outputs(tower, pixels, grid), (exact.last_hidden_state, exact.pooler_output)) < 2e-6


def test_odd_outputs_of_hooks_and_norms_of_others(tower, monkeypatch):
    monkeypatch.setattr(module, "FUSED_ON", ("cpu", "cuda"))
    pixels, grid = batch([[1, 4, 4]], tower)
    block = tower.blocks[1]
    block.attn.register_forward_hook(lambda m, _, out: out.mean(0, keepdim=True).expand_as(out))
    block.mlp.register_forward_hook(lambda m, _, out: out.t().contiguous().t())
    norm = tower.blocks[2].norm2
    norm.forward = lambda x: 2 * type(norm).forward(norm, x)
    with torch.no_grad():
        exact = outputs(tower, pixels, grid)
        with accelerate(tower):
            assert error(outputs(tower, pixels, grid), exact) < 2e-6


def test_a_forward_wrapped_meanwhile_goes_with_the_rest(tower):
    pixels, grid = batch(GRIDS[0], tower)
    with torch.no_grad():
        exact = outputs(tower, pixels, grid)
        with accelerate(tower):
            inner = tower.forward
            tower.forward = lambda *args, **kwargs: inner(*args, **kwargs)
            outputs(tower, pixels, grid)
        assert not any("forward" in each.__dict__ for each in tower.modules())
        assert all(map(torch.equal, outputs(tower, pixels, grid), exact))
    assert all(p.is_contiguous() for p in tower.parameters())


def test_an_attention_layer_without_the_names_is_refused():
    def forward(x):
        return sorted(x)

    with pytest.raises(ValueError, match="apply_rotary_pos_emb_vision"):
        attention.exchange(forward, {"apply_rotary_pos_emb_vision": None})
    assert attention.exchange(forward, {"sorted": max})([1, 3]) == 3 and forward([3, 1]) == [1, 3]


def test_runs_of_segments():
    assert attention.runs_of(torch.tensor([0, 4, 8, 10, 12, 16])) == [(0, 2, 4), (8, 2, 2), (12, 1, 4)]
    assert attention.runs_of(torch.tensor([0, 4, 4, 8])) == [(0, 1, 4), (4, 1, 4)]
    assert attention.runs_of(torch.tensor([0])) == []


def test_many_batches(tower):
    rng = np.random.default_rng(0)
    with accelerate(tower), torch.no_grad():
        for i in range(20):
            grid = [[int(rng.integers(1, 3)), *(2 * rng.integers(1, 9, 2)).tolist()] for _ in range(rng.integers(1, 4))]
            pixels, table = batch(grid, tower, seed=i)
            mine = outputs(tower, pixels, table)
            exact = type(tower).forward(tower, pixels, table)  # the attention is still ours
            assert error(mine, (exact.last_hidden_state, exact.pooler_output)) < 2e-6


def test_under_torch_compile(tower):
    pixels, grid = batch(GRIDS[0], tower)
    plan = vitkit.VisionPlan.from_grid(grid, vitkit.Geometry.from_config(tower.config))
    with torch.no_grad():
        exact = outputs(tower, pixels, grid)
        with accelerate(tower):
            compiled = torch.compile(tower, backend="eager")
            assert error(outputs(compiled, pixels, grid, **plan.model_kwargs()), exact) < 2e-6
            assert error(outputs(compiled, pixels, grid), exact) < 2e-6
            assert error(outputs(tower, pixels, grid), exact) < 2e-6
