"""What a whole run of a trainer leaves behind, for tests that compare two runs."""

import torch


def outcome(trainer, steps: int) -> dict[str, torch.Tensor]:
    """Every logged loss and gradient norm of a run that logged `steps` steps, and the adapters at the end."""
    found = {}
    for entry in trainer.state.log_history:
        for key in ("loss", "grad_norm", "eval_loss"):
            if key in entry:
                found[f"{key} {entry['step']}"] = torch.tensor(entry[key])
    assert sum(not name.startswith("eval") for name in found) == 2 * steps
    return found | {n: p.detach().cpu().clone() for n, p in trainer.model.named_parameters() if p.requires_grad}
