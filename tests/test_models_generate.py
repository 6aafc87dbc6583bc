"""The full Qwen2.5-VL at small dimensions generates the same tokens with its tower accelerated."""

import pytest
import torch

import vitkit

pytest.importorskip("transformers")

from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def test_generates_the_same_tokens():
    torch.manual_seed(0)
    text = {
        "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 200, "max_position_embeddings": 512,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]},
        "bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0,
    }  # fmt: skip
    vision = {
        "depth": 3, "hidden_size": 64, "intermediate_size": 100, "num_heads": 2, "out_hidden_size": 64,
        "fullatt_block_indexes": [2],
    }  # fmt: skip
    tokens = {"image_token_id": 190, "video_token_id": 191, "vision_start_token_id": 192, "vision_end_token_id": 193}
    config = Qwen2_5_VLConfig(text_config=text, vision_config=vision, **tokens)
    model = Qwen2_5_VLForConditionalGeneration(config).eval().to(DEVICE)
    grid = torch.tensor([[1, 8, 12], [1, 4, 6]])
    pixels = torch.randn(int(grid.prod(1).sum()), 1176, device=DEVICE)
    images = [[192, *[190] * (int(g.prod()) // 4), 193] for g in grid]
    ids = torch.tensor([[1, 5, *images[0], 7, *images[1], 9, 11]], device=DEVICE)
    inputs = {
        "input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": pixels,
        "image_grid_thw": grid.to(DEVICE), "mm_token_type_ids": (ids == 190).int(),
    }  # fmt: skip
    options = {"max_new_tokens": 12, "do_sample": False}
    exact = model.generate(**inputs, **options)
    with vitkit.accelerate(model.model.visual):
        for _ in range(3):
            assert torch.equal(model.generate(**inputs, **options), exact)
    assert exact.shape[1] == ids.shape[1] + 12
