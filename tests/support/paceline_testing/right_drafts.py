"""Models whose drafts always pay, on any machine, and a scaling of draft workers that is quick to see it."""

from pathlib import Path

from safetensors.torch import load_file, save_file

from paceline_testing.ascii_model import speak_ascii
from paceline_testing.tiny_models import save_tiny_model

# Any work at all is reason enough for one worker more: what is shown is how they come and go.
EAGER_SCALING = {
    "draft_busy_share": 0.001,
    "draft_min_gain": 0.0,
    "look_back_s": 2.0,
    "upscale_delay_s": 0.0,
    "downscale_delay_s": 1.0,
}
_LAYERS = 16


def target_and_right_draft(directory: Path) -> tuple[Path, Path]:
    """A target whose upper layers add nothing, and its first layer as a drafter that is always right: drafts cost a
    small part of what they save."""
    shape = {"hidden_size": 48, "max_positions": 1024}
    target = save_tiny_model(directory / "target", "llama", 5, layers=_LAYERS, **shape)
    draft = save_tiny_model(directory / "draft", "llama", 5, layers=1, **shape)
    speak_ascii(target)
    weights = load_file(target / "model.safetensors")
    for name in weights:
        if ".layers.0." not in name and ("o_proj" in name or "down_proj" in name):
            weights[name].zero_()
    save_file(weights, target / "model.safetensors", {"format": "pt"})
    kept = {name: weights[name] for name in load_file(draft / "model.safetensors")}
    save_file(kept, draft / "model.safetensors", {"format": "pt"})
    return target, draft
