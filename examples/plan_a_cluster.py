"""Plan for a cluster that you do not have.

No GPU and no torch: the costs are numbers, here from arithmetic, or from `measure` on one
device. `search` chooses cuts, placement, stages per rank, checkpoints and the order, under a
limit of memory, and says how far from the best possible the plan can be. The plan is a file that
`Pipeline` runs unchanged.

    python examples/plan_a_cluster.py
"""

import penstock as ps

RANKS, BATCH = 8, 32
WIDTH, TOKENS, WORDS, BLOCKS = 4096, 4096, 128_000, 30
# What a device does: numbers of a data sheet, and how much of them to expect.
FLOPS, BYTES_PER_SECOND, MEMORY = 990e12 * 0.4, 50e9, 72 * 2**30


def matrices(parameters: float) -> float:
    """Return the seconds of one microbatch for the products with `parameters` parameters."""
    return 2 * parameters * TOKENS / FLOPS


def piece(name: str, parameters: float, activations: float, *, products: float) -> ps.Piece:
    """Return a layer; a parameter takes 2 bytes, its gradient 2 and its optimizer state 12."""
    seconds = matrices(products)
    return ps.Piece(
        name,
        forward=seconds,
        backward_input=seconds,
        backward_weight=seconds,
        parameter_bytes=2 * parameters,
        gradient_bytes=2 * parameters,
        optimizer_bytes=12 * parameters,
        activation_bytes=activations,
        weight_stash_bytes=activations / 2,
        message_bytes=2 * TOKENS * WIDTH,
    )


block, table = 12 * WIDTH**2, WIDTH * WORDS
layers = [
    piece("embedding", table, 2 * TOKENS * WIDTH, products=0),
    *(piece(f"block {n}", block, 34 * TOKENS * WIDTH, products=block) for n in range(BLOCKS)),
    piece("head", table, 4 * TOKENS * WORDS, products=table),
]
transfer = 2 * TOKENS * WIDTH / BYTES_PER_SECOND
findings = ps.search(layers, ranks=RANKS, batch=BATCH, memory=MEMORY, transfer=transfer, seconds=5)
print(findings)
print(findings.best)
findings.best.to_file("plan.json")  # later: ps.Pipeline(pipe, ps.Plan.from_file("plan.json"), ...)
