"""An accelerated tower keeps its weights, follows them where they change, and trains as the original does."""

import copy
import warnings

import pytest
import torch
from tower_models import ALL, GRIDS, KINDS, accelerate, batch, error, make, outputs

from vitkit.models import tower as module

transformers = pytest.importorskip("transformers")


@pytest.fixture(params=KINDS)
def tower(request):
    return make(request.param)


def test_the_weights_stay_what_they_were(tower, tmp_path):
    before = {name: x.clone() for name, x in tower.state_dict().items()}
    parameters = dict(tower.named_parameters())
    pixels, grid = batch(GRIDS[0], tower)

    def check():
        now = tower.state_dict()
        assert list(now) == list(before) and all(torch.equal(now[name], before[name]) for name in now)
        assert all(parameter is parameters[name] for name, parameter in tower.named_parameters())

    with accelerate(tower), torch.no_grad():
        check()
        exact = outputs(tower, pixels, grid)
        check()
        tower.save_pretrained(tmp_path)
        tower.load_state_dict(before)
        check()
    check()
    assert all(p.is_contiguous() and p.untyped_storage().nbytes() == 4 * p.numel() for p in parameters.values())
    with torch.no_grad():
        assert error(outputs(type(tower).from_pretrained(tmp_path), pixels, grid), exact) < 2e-6


def test_no_weight_is_held_twice():
    tower = make("qwen2_5_vl")
    mlp = tower.blocks[0].mlp
    with accelerate(tower, ["mlp"]), torch.no_grad():
        tower(*batch(GRIDS[0], tower))
        storages = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in mlp.parameters()}
        entries = 2 * 104 * (64 + 1) + 64 * 104 + 64  # at a width of 104 instead of 100
        assert sum(storages.values()) == 4 * entries


@pytest.mark.parametrize("change", ["in place", "assigned", "dtype", "loaded by assignment"])
def test_weights_that_change_are_seen(tower, change):
    pixels, grid = batch(GRIDS[1], tower)
    with accelerate(tower), torch.no_grad():
        tower(pixels, grid)
        if change == "in place":
            for p in tower.parameters():
                p.mul_(1.1)
        elif change == "assigned":
            for p in tower.parameters():
                p.data = p.data * 1.1
        elif change == "dtype":
            tower.double()
            pixels = pixels.double()
        else:
            tower.load_state_dict({k: v * 1.1 for k, v in tower.state_dict().items()}, assign=True)
        mine = outputs(tower, pixels, grid)
    with torch.no_grad():
        assert error(mine, outputs(tower, pixels, grid)) < 2e-6


def test_gradients_are_the_originals(tower):
    pixels, grid = batch(GRIDS[1], tower)

    def gradients():
        tower.zero_grad()
        x = pixels.clone().requires_grad_()
        tower(x, grid).pooler_output.square().mean().backward()
        return [x.grad, *(p.grad.clone() for p in tower.parameters())]

    tower.train()
    exact = gradients()
    with accelerate(tower), pytest.warns(UserWarning, match="gradients are recorded.*mlp, norms, windows"):
        with torch.no_grad():
            tower(pixels, grid)  # pads the weights first
        mine = gradients()
    for a, b in zip(mine, exact):
        assert (a - b).norm() <= 2e-6 * b.norm() + 1e-12
    tower.gradient_checkpointing_enable()
    with accelerate(tower), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        again = gradients()
    for a, b in zip(again, exact):
        assert (a - b).norm() <= 2e-6 * b.norm() + 1e-12


@pytest.mark.parametrize("trained", ["down_proj.bias", "fc2.bias", "norm2.bias", "norm1.weight", "blocks.1.attn.proj"])
def test_gradients_of_a_few_parameters(tower, trained, monkeypatch):
    monkeypatch.setattr(module, "FUSED_ON", ("cpu", "cuda"))
    for name, parameter in tower.named_parameters():
        parameter.requires_grad_(trained in name)
    if not any(p.requires_grad for p in tower.parameters()):
        pytest.skip(f"this tower has no {trained}")
    pixels, grid = batch([[1, 4, 4]], tower)
    gradients = []
    for parts in ((), ALL):
        with accelerate(tower, parts), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tower.zero_grad()
            tower(pixels, grid).pooler_output.square().mean().backward()
        gradients.append([p.grad.clone() for p in tower.parameters() if p.requires_grad])
    for a, b in zip(*gradients, strict=True):
        assert (a - b).norm() <= 1e-5 * b.norm() + 1e-12


def test_a_training_step(tower):
    other, (pixels, grid) = copy.deepcopy(tower), batch(GRIDS[0], tower)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with accelerate(tower):
            for each in (tower, other):
                optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
                for _ in range(2):
                    optimizer.zero_grad()
                    each(pixels, grid).pooler_output.square().mean().backward()
                    optimizer.step()
            with torch.no_grad():
                mine = outputs(tower, pixels, grid)
    with torch.no_grad():
        assert error(mine, outputs(other, pixels, grid)) < 1e-5


def test_inference_mode_first_and_training_after(tower):
    pixels, grid = batch(GRIDS[0], tower)
    with accelerate(tower), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch.inference_mode():
            exact = [x.clone() for x in outputs(tower, pixels, grid)]
        tower(pixels, grid).pooler_output.sum().backward()
        assert all(p.grad is not None and not p.is_inference() for p in tower.parameters())
        with torch.no_grad():
            assert error(outputs(tower, pixels, grid), exact) < 2e-6
