"""The cost of one DP-SGD step of recurrent networks: `python -m benchmarks.recurrent`."""

from functools import partial

from torch import Tensor, nn

from benchmarks.contenders import (
    PLAIN,
    Contender,
    Factory,
    dpspan_step,
    opacus_step,
    plain_step,
)
from benchmarks.problems import PROBLEMS, RECURRENT
from benchmarks.run import Race, parser, publish


def with_opacus_layer(model: nn.Module, x: Tensor, y: Tensor, noise: float, mode: str) -> Contender:
    """Opacus, with its own layer in place of torch's; its fix() would leave nn.RNN."""
    from opacus.layers import DPGRU, DPLSTM, DPRNN

    rnn = model.rnn
    kind = {nn.LSTM: DPLSTM, nn.GRU: DPGRU, nn.RNN: DPRNN}[type(rnn)]
    names = ("input_size", "hidden_size", "num_layers", "bidirectional", "batch_first")
    model.rnn = kind(**{name: getattr(rnn, name) for name in names}).to(x.device)
    model.rnn.load_state_dict(rnn.state_dict(), strict=False)  # its cells' names are aliases
    return opacus_step(model, x, y, noise, mode=mode)


MODES = ("hooks", "ghost", "functorch")
FACTORIES: dict[str, Factory] = {
    PLAIN: plain_step,
    **{f"opacus {mode}": partial(with_opacus_layer, mode=mode) for mode in MODES},
    "dpspan": dpspan_step,
}


def race(name: str) -> Race:
    """One network; every private step is checked against clipping in a loop."""
    batch = PROBLEMS[name].batch
    return Race(name, batch, FACTORIES, label=str(batch), check=True)


def main() -> None:
    """Measure all networks and publish."""
    options = parser("benchmarks.recurrent", __doc__, list(RECURRENT)).parse_args()
    publish(options.models or list(RECURRENT), race, options)


if __name__ == "__main__":
    main()
