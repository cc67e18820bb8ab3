"""`--evaluate membership`: attack the run that has just finished, as a measurement."""

from __future__ import annotations

from ...errors import RunError, UserError
from ...runs.measures import Measure, Numbers, Run

SHOWN = {"logistic": "the outputs", "loss": "the loss"}


class Membership(Measure):
    """The accuracy of membership inference by the outputs, or the losses, of the finished model."""

    def prepare(self, run: Run) -> None:
        if run.out is None:
            raise UserError(
                "--evaluate membership attacks a finished run in its folder, and this run has none; give out, or leave "
                "membership out"
            )

    def at_end(self, run: Run) -> Numbers | None:
        """Run the attack on rank 0 while the others wait."""
        if run.comm.rank or run.out is None:
            return None
        from .command import attack_run  # imported late: only a finished run needs it

        try:
            found = attack_run(run.out, given=run.given)
        except (UserError, RunError) as error:
            raise RunError(f"membership attack: {error}; then try 'fedmpi attack {run.out}'") from error
        verdicts = {name: found[name] for name in SHOWN if found[name] is not None}
        texts = [f"{verdict['accuracy']:.4f} by {SHOWN[name]}" for name, verdict in verdicts.items()]
        run.print(f"membership attack: accuracy {', '.join(texts)}; guessing has 0.5")
        measured = ("accuracy", "auc", "advantage", "tpr_at_1_fpr")
        return {f"membership_{name}": {key: one[key] for key in measured} for name, one in verdicts.items()}
