"""Facts read of programs' text: of one by hand in the compiler's words, and of compiled ones."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from pard_jax.bench import hlo

# A step's loop, with a loop over layers in it, which has one of its own for attention.
TEXT = """\
HloModule jit__decode, is_scheduled=true, input_output_alias={ {0}: (1, {}, may-alias) }, \
entry_computation_layout={(bf16[36,100,2560]{2,1,0:T(8,128)(2,1)}, bf16[2,1,8,512,64]{4,3,2,1,0:T(8,128)(2,1)}, \
/*index=2*/s32[]{:T(128)}, f32[300,8]{0,1:T(8,128)S(1)}, pred[1]{0:T(512)(128)(4,1)})->(bf16[2,1,8,512,64]{4,3,2,1,0})}

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[]{:T(128)} parameter(0)
  ROOT %add.1 = f32[]{:T(128)} add(%a, %b)
}

%blocks (p: (s32[], f32[4])) -> (s32[], f32[4]) {
  %all-to-all.1 = f32[4]{0:T(128)} all-to-all(%x), metadata={op_name="x/attention/while"}
}

%fused (q: bf16[16,8]) -> bf16[16,8] {
  %copy.1 = s8[9000,9000]{1,0:T(8,128)(4,1)} copy(%w)
  ROOT %dot.1 = bf16[16,8]{1,0:T(8,128)} dot(%q, %copy.1)
}

%layer.clone (p: (s32[], bf16[1,4])) -> (s32[], bf16[1,4]) {
  %while.1 = (s32[]{:T(128)}, f32[4]{0:T(128)}) while(%t), condition=%true, body=%blocks, metadata={op_name="x"}
  %all-reduce.1 = bf16[1,4]{1,0:T(8,128)(2,1)S(1)} all-reduce(%y), to_apply=%add, metadata={op_name="x/attention/dot"}
  %all-reduce-start.2 = (bf16[1,4]{1,0}, bf16[1,4]{1,0}) all-reduce-start(%z), metadata={op_name="x/mlp/dot"}
  ROOT %fusion.1 = bf16[16,8]{1,0:T(8,128)} fusion(%r), kind=kLoop, calls=%fused
}

%true (p: (s32[], f32[4])) -> pred[] {
  ROOT %c = pred[]{:T(512)} constant(true)
}

%step (p: (s32[], bf16[1,4])) -> (s32[], bf16[1,4]) {
  %while.2 = (s32[]{:T(128)}, bf16[1,4]{1,0}) while(%t), condition=%true, body=%layer.clone, metadata={op_name="x"}
  %all-gather.1 = bf16[4,4]{1,0} all-gather(%g), dimensions={0}, metadata={op_name="x/verify/gather"}
  %copy-start = (f32[1000,64]{1,0:T(8,128)S(1)}, f32[1000,64]{1,0:T(8,128)}, u32[]{:S(2)}) copy-start(%w)
  %copy-start.1 = (f32[40,64]{1,0:T(8,128)S(1)}, f32[40,64]{0,1:T(8,128)}, u32[]{:S(2)}) copy-start(%w)
  %sort = (s32[2,32]{1,0:T(8,128)}, pred[2,32]{1,0:T(8,128)}) sort(%k, %v), dimensions={1}, to_apply=%add
  ROOT %fusion.2 = f32[9]{0} fusion(%h), calls=%mlp, metadata={op_name="x/target/mlp/dot"}
}

%mlp (h: f32[9]) -> f32[9] {
  ROOT %copy.9 = f32[9]{0:T(128)} copy(%h)
}

ENTRY %main.3_spmd (param.0: bf16[36,100,2560]) -> (bf16[2,1,8,512,64]) {
  %param.0 = bf16[36,100,2560]{2,1,0:T(8,128)(2,1)} parameter(0), metadata={op_name="params['target']"}
  %while.3 = (s32[]{:T(128)}, bf16[1,4]{1,0}) while(%t), condition=%true, body=%step, metadata={op_name="x/while"}
  ROOT %all-reduce.5 = (bf16[1,4]{1,0}, f32[2]{0}) all-reduce(%m, %n), to_apply=%add, metadata={op_name="x/gather"}
}
"""


def test_by_hand() -> None:
    found = hlo.read(TEXT)
    # With what is called from it; neither the loop around it nor the one within.
    assert found.layers == [{"all-reduce": 2, "all-to-all": 1}]
    assert found.others == {"all-gather": 1, "all-reduce": 1}
    assert found.largest_copy == 40 * 64 * 4  # not what moves into vector memory, or is part of a product
    assert found.longest_sort == 32


def test_padding_by_hand() -> None:
    weights, cache, step, turned, flag = hlo.read(TEXT).arguments
    assert weights == hlo.Argument("bf16[36,100,2560]", 36 * 100 * 2560 * 2, 36 * 104 * 2560 * 2)
    assert (cache.size, cache.padded) == (2 * 8 * 512 * 64 * 2, 2 * 8 * 512 * 128 * 2)
    assert (step.type, step.size, step.padded) == ("s32[]", 4, 4)
    assert (turned.size, turned.padded) == (300 * 8 * 4, 8 * 384 * 4)  # the first axis runs fastest
    assert (flag.size, flag.padded) == (1, 512)
    assert hlo.read(TEXT).worst_padding == 2.0  # of those of some size


def test_of_programs_compiled_here() -> None:
    def sorted_rows(x: jax.Array) -> jax.Array:
        return jnp.sort(x, axis=0)

    text = jax.jit(sorted_rows).lower(jax.ShapeDtypeStruct((70, 30), jnp.float32)).compile().as_text()
    found = hlo.read(text or "")
    assert found.longest_sort == 70 and found.layers == [] and found.others == {}
    assert [(a.type, a.size, a.padded) for a in found.arguments] == [("f32[70,30]", 8400, 8400)]
    assert found.worst_padding == 1.0


@pytest.mark.parametrize("scope", ["mlp", "verify"])
def test_only_loops_with_an_mlp_are_layers(scope: str) -> None:
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, "x"))

    def loop(x: jax.Array, w: jax.Array) -> jax.Array:
        def turn(x: jax.Array, _: None) -> tuple[jax.Array, None]:
            with jax.named_scope(scope):
                return jnp.tanh(x @ w.T) @ w, None

        return lax.scan(turn, x, length=3)[0]

    # Of another size each: JAX's compilation cache takes programs that differ in their scopes alone for the same.
    x = jax.ShapeDtypeStruct((len(scope), 16), jnp.float32, sharding=split)
    w = jax.ShapeDtypeStruct((8, 16), jnp.float32, sharding=split)
    found = hlo.read(jax.jit(loop).lower(x, w).compile().as_text() or "")
    assert found.layers == ([{"all-reduce": 1}] if scope == "mlp" else [])
    assert found.others == ({} if scope == "mlp" else {"all-reduce": 1})
