"""Are the kernels correct on the device? Each is compared with its reference."""

import functools
from collections.abc import Callable
from typing import Any

from bench.gpu_checks.attention import Step, attention
from bench.gpu_checks.report import HEAD_DIM, HEADS, PAGE, Report, gpu_target, median_seconds, read_rate

DECODE = [(1 + 97 * row % 1500, 1) for row in range(24)]


def compare(chunks: list[tuple[int, int]], limit: float, target: Any, rule: Any = None, bias: Any = None,
            **sizes: Any) -> dict[str, Any]:
    """Attention over a step of these chunks beside its reference; `sizes` are `Step.make`'s."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from jaxpaged.pallas_kernels import reference
    from jaxpaged.pallas_kernels.attention_rule import AttentionRule, HeadBias

    step = Step.make(chunks, **sizes)
    rule = rule or AttentionRule(step.q.shape[2] ** -0.5)
    found = np.asarray(attention(step, target, rule=rule, bias=bias)(), np.float32)
    wide = jax.tree.map(lambda leaf: leaf.astype(jnp.float32) if leaf.dtype.itemsize == 2 else leaf, step.pages)
    with jax.default_matmul_precision("highest"):
        wanted = jax.jit(functools.partial(reference.paged_attention, rule=rule, bias=bias or HeadBias()))(
            step.q.astype(jnp.float32), wide, step.table, step.slot, step.position)
    off = float(np.abs(found - np.asarray(wanted)).max())
    return {"off_by": off, "ok": off < limit}


def check_kernels(report: Report) -> None:
    """Every kernel against its plain specification, on the device."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from jaxpaged.pallas_kernels import reference
    from jaxpaged.pallas_kernels.attention_rule import AttentionRule, HeadBias, alibi_slopes
    from jaxpaged.pallas_kernels.kv_pages import KVPages
    from jaxpaged.pallas_kernels.rotary_kv_write import rotary_kv_write

    target = gpu_target(report.smoke)
    mixed = [(5, 1), (17, 17), (33, 1)] if report.smoke else \
        [(1, 1), (15, 1), (16, 1), (17, 1), (700, 1), (1100, 1), (64, 64), (300, 70), (129, 40)]

    def check(chunks: list[tuple[int, int]], limit: float, rule: Any = None, bias: Any = None, **sizes: Any) -> Any:
        return compare(chunks, limit, target, rule, bias, **sizes)

    small: dict[str, Any] = {"heads": 4, "kv_heads": 2, "head_dim": 64} if report.smoke else {}
    cases: dict[str, Callable[[], dict[str, Any]]] = {"mixed": lambda: check(mixed, 0.03, **small)}
    if not report.smoke:
        rule = AttentionRule(HEAD_DIM**-0.5, window=100, softcap=20.0)
        bias = HeadBias(jnp.asarray(alibi_slopes(HEADS)), jnp.linspace(-1, 1, HEADS))
        cases |= {
            "decode": lambda: check(DECODE, 0.03),
            "int8 pages": lambda: check(mixed, 0.05, dtype="int8"),
            "window, soft cap": lambda: check(mixed, 0.03, rule),
            "ALiBi, sinks": lambda: check(mixed, 0.03, None, bias),
            "float16": lambda: check(mixed, 0.01, dtype="float16"),
            "float32": lambda: check(mixed, 0.001, dtype="float32"),
            "float32 over int8 pages": lambda: check(mixed, 0.001, dtype="int8", wide="float32"),
            "float16 over int8 pages": lambda: check(mixed, 0.02, dtype="int8", wide="float16"),
            "group 7, head 64": lambda: check(mixed, 0.03, heads=28, kv_heads=4, head_dim=64),
            "group 9, head 96, pages of 64": lambda: check(mixed, 0.03, heads=18, kv_heads=2, head_dim=96, page=64),
            "head 256": lambda: check(mixed, 0.03, heads=16, kv_heads=8, head_dim=256),
            "head 80": lambda: check(DECODE, 0.03, heads=8, kv_heads=8, head_dim=80),
        }
        if target.has_fp8:
            cases["fp8 pages"] = lambda: check(mixed, 0.15, dtype="float8_e4m3fn")

    def rotary(dtype: str) -> dict[str, Any]:
        tokens = 8 if report.smoke else 200
        step = Step.make([(tokens, tokens)], dtype=dtype, **small)
        kv_heads, head_dim = step.pages.k.shape[2], step.q.shape[2]
        keys = jax.random.split(jax.random.key(5), 3)
        k, v = (jax.random.normal(key, (tokens, kv_heads, head_dim)).astype(step.q.dtype) for key in keys[:2])
        angle = jax.random.uniform(keys[2], (tokens, head_dim // 2), maxval=6.0)
        page = jnp.where(jnp.arange(tokens) % 5 == 4, -1, step.table[0, jnp.arange(tokens) // PAGE])
        args = (step.q, k, v, jnp.cos(angle), jnp.sin(angle), page, jnp.arange(tokens) % PAGE)
        q, _, pages = jax.jit(functools.partial(rotary_kv_write, target=target))(*args, step.pages)
        wanted_q, wanted = reference.rotary_kv_write(*args, step.pages)

        def away(found: Any, wanted: Any) -> float:
            return float(np.abs(np.asarray(found, np.float32) - np.asarray(wanted, np.float32)).max())

        def unscaled(pages: KVPages) -> Any:
            return [np.asarray(pool, np.float32) * (1 if scale is None else
                                                    np.asarray(scale).swapaxes(1, 2)[..., None])
                    for pool, scale in ((pages.k, pages.k_scale), (pages.v, pages.v_scale))]

        off = max(away(q, wanted_q), *(away(*pair) for pair in zip(unscaled(pages), unscaled(wanted), strict=True)))
        return {"off_by": off, "ok": off < (0.3 if dtype == "float8_e4m3fn" else 0.05)}

    report.run("attention, mixed", cases.pop("mixed"))
    dtypes = ("int8",) if report.smoke else ("bfloat16", "int8", *("float8_e4m3fn",) * target.has_fp8)
    for dtype in dtypes:
        report.run(f"rotary and KV write, {dtype}", functools.partial(rotary, dtype))
    report.run("sampler", lambda: compare_sampler(target, report.smoke))
    report.run("top tokens", lambda: compare_top_tokens(target, report.smoke))
    for kind, group in (("int4", 128), ("int4", 32), ("int8", 4096), ("fp8", 128))[: 1 if report.smoke else 4]:
        report.run(f"packed product, {kind} in groups of {group}",
                   functools.partial(compare_packed, target, report.smoke, kind, group))
    for name, case in cases.items():
        report.run(f"attention, {name}", case, 5)


def compare_packed(target: Any, smoke: bool, kind: str, group: int) -> dict[str, Any]:
    """Products of 1 to 64 rows with packed weights beside the specification's; how fast 16 rows read the weight."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from jaxpaged.pallas_kernels import packed_linear, reference
    from jaxpaged.pallas_kernels.packed_layout import TILE, PackedLayout, PackedWeight

    layout = PackedLayout(kind, *((256, 128) if smoke else (4096, 28672)), group, 128 if kind == "fp8" else 1)
    keys = jax.random.split(jax.random.key(0), 4)
    shape = (layout.padded_columns // TILE, layout.blocks, TILE, layout.words)
    words = jax.random.bits(keys[0], shape, jnp.uint16)
    if kind == "fp8":
        words = words & 0xBFBF  # no NaN, and numbers of at most 2
    scales = (layout.groups, layout.columns // layout.scale_columns)
    scale = 0.01 * jax.random.uniform(keys[1], scales, jnp.float16)
    zero = jax.random.randint(keys[2], scales, 0, 16).astype(jnp.uint8) if kind == "int4" else None
    weight = PackedWeight(words.view(jnp.int16), scale, zero)
    product = jax.jit(functools.partial(packed_linear.product, layout=layout, target=target))
    plain = jax.jit(functools.partial(reference.packed_linear, layout=layout))
    off = 0.0
    for rows in (3,) if smoke else (1, 16, 33, 64):
        x = jax.random.normal(jax.random.fold_in(keys[3], rows), (rows, layout.rows), jnp.bfloat16)
        with jax.default_matmul_precision("highest"):
            wanted = np.asarray(plain(x.astype(jnp.float32), weight))
        off = max(off, float(np.abs(np.asarray(product(x, weight), np.float32) - wanted).max() / np.abs(wanted).max()))
    found = {"off_by": off, "ok": off < 0.005}
    if smoke:
        return found
    x = x[:16]
    seconds = median_seconds(lambda: product(x, weight))
    read = sum(leaf.nbytes for leaf in jax.tree.leaves(weight))
    return found | {"us": 1e6 * seconds, "share_of_read_rate": read / seconds / read_rate(smoke)}


def compare_top_tokens(target: Any, smoke: bool) -> dict[str, Any]:
    """The best tokens of rows with ties in many of their columns, beside the specification's; and the time."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from jaxpaged.pallas_kernels import reference
    from jaxpaged.pallas_kernels.top_tokens import top_tokens

    rows, vocab, count = (2, 3000, 4) if smoke else (64, 128256, 20)
    logits = jnp.round(8 * jax.random.normal(jax.random.key(0), (rows, vocab))) / 8
    kernel = jax.jit(functools.partial(top_tokens, count=count, wanted=jnp.ones(rows, jnp.bool_), target=target))
    wanted = jax.jit(functools.partial(reference.top_tokens, count=count))(logits)
    found = {"ok": all(bool(np.array_equal(*pair)) for pair in zip(kernel(logits), wanted, strict=True))}
    return found if smoke else found | {"us": 1e6 * median_seconds(lambda: kernel(logits)[0])}


def compare_sampler(target: Any, smoke: bool) -> dict[str, Any]:
    """The kernel's draws beside the XLA path's, which draws the same but for rounding; and its time for 64 rows."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from jaxpaged.core.messages import EngineRequest
    from jaxpaged.core.sampling_params import SamplingParams
    from jaxpaged.execution.sampler import sample as sample_with_xla
    from jaxpaged.execution.sampler import state_of
    from jaxpaged.pallas_kernels.sampler import SlotParameters, sample

    rows, vocab = (4, 600) if smoke else (64, 128256)
    rng = np.random.default_rng(0)
    logits = jnp.asarray(rng.normal(0, 3, (rows, vocab)), jnp.float32)
    params = [SamplingParams(temperature=float(rng.choice([0, 0.7, 1.3])), top_k=int(rng.choice([0, 1, 40])),
                             top_p=float(rng.choice([1, 0.9])), min_p=float(rng.choice([0, 0.05])))
              for _ in range(rows)]
    state = jax.device_put(state_of([EngineRequest(str(row), (1,), item, 1, seed=row)
                                     for row, item in enumerate(params)], rows))
    slot, last = jnp.arange(rows), jnp.zeros(rows, jnp.int32)
    parameters = SlotParameters(*(getattr(state, name) for name in SlotParameters._fields))
    kernel = jax.jit(functools.partial(sample, target=target))
    plain = jax.jit(sample_with_xla)
    equal = total = 0
    for position in range(1 if smoke else 20):
        at = jnp.full(rows, position, jnp.int32)
        equal += int(jnp.sum(kernel(logits, parameters, slot, at, last)[0] == plain(logits, state, at)))
        total += rows
    found: dict[str, Any] = {"equal": equal, "of": total, "ok": equal >= 0.98 * total}
    if not smoke:
        found["us"] = 1e6 * median_seconds(lambda: kernel(logits, parameters, slot, at, last)[0])
    return found
