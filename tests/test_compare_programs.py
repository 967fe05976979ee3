"""Compiled programs are told apart by what they do, not by how they are written."""

import jax
import jax.numpy as jnp
import pytest

from tests import commands

compare_programs = commands.module("compare_programs")

X = jax.ShapeDtypeStruct((4, 8), jnp.float32)


def normal_form(f):
  return compare_programs.normalised(jax.jit(f).lower(X, X).compile().as_text())


def grow(x, y):
  step = lambda i, x: x @ x.T @ y + jnp.sin(x) * 2.0
  return jax.lax.fori_loop(0, 3, step, x) - y


def renamed_and_moved(first, second):
  def another_name(_, state):
    product = state @ state.T
    with jax.named_scope("inside"):
      return product @ second + jnp.sin(state) * 2.0

  return jax.lax.fori_loop(0, 3, another_name, first) - second


def another_constant(x, y):
  step = lambda i, x: x @ x.T @ y + jnp.sin(x) * 3.0
  return jax.lax.fori_loop(0, 3, step, x) - y


def another_operation(x, y):
  step = lambda i, x: x @ x.T @ y + jnp.cos(x) * 2.0
  return jax.lax.fori_loop(0, 3, step, x) - y


def another_operand(x, y):
  step = lambda i, x: x @ x.T @ y + jnp.sin(x) * 2.0
  return y - jax.lax.fori_loop(0, 3, step, x)


def test_names_and_places_in_the_source_do_not_count():
  texts = [jax.jit(f).lower(X, X).compile().as_text() for f in (grow, renamed_and_moved)]
  assert texts[0] != texts[1]
  a, b = map(compare_programs.normalised, texts)
  assert compare_programs.difference(a, b) == []
  assert "metadata" not in a and "grow" not in a and ".py" not in a


@pytest.mark.parametrize(
  ("other", "one", "another"),
  [
    (another_constant, "constant(2)", "constant(3)"),
    (another_operation, "sine(", "cosine("),
    (another_operand, "", ""),
  ],
)
def test_an_instruction_that_differs_is_found(other, one, another):
  """And shown; nothing else is."""
  lines = compare_programs.difference(normal_form(grow), normal_form(other))
  removed, added = ([x for x in lines if x[0] == sign] for sign in "-+")
  assert len(removed) == len(added) == 1
  assert one in removed[0] and another in added[0]


TEXT = """\
HloModule jit_f, is_scheduled=true, frontend_attributes={a={b=1},fingerprint="x}"}

FileNames
1 "/here/f.py"

StackFrames
1 {file_location_id=1 parent_frame_id=1}

%region_0.3 (a.1: f32[2], /*index=1*/b: (f32[], s32[])) -> f32[2] {
  %a.1 = f32[2]{0} parameter(0)
  %b = (f32[], s32[]) parameter(1)
  ROOT %c-start.7 = f32[2]{0} negate(%a.1), metadata={op_name="f/\\"{g" stack_frame_id=1}
}

ENTRY %main.9 (p: f32[2]) -> f32[2] {
  %p = f32[2]{0} parameter(0), sharding={devices=[2]<=[2]}
  ROOT %r = f32[2]{0} all-reduce(%p), channel_id=17, to_apply=%region_0.3
}
"""
NORMAL = """\
HloModule, is_scheduled=true

%0 (f32[2], /*index=1*/(f32[], s32[])) -> f32[2] {
  %1 = f32[2]{0} parameter(0)
  %2 = (f32[], s32[]) parameter(1)
  ROOT %3 = f32[2]{0} negate(%1)
}

ENTRY %4 (f32[2]) -> f32[2] {
  %5 = f32[2]{0} parameter(0), sharding={devices=[2]<=[2]}
  ROOT %6 = f32[2]{0} all-reduce(%5), channel_id=0, to_apply=%0
}
"""


def test_the_normal_form_of_a_program():
  assert compare_programs.normalised(TEXT) == NORMAL


def test_an_instruction_more_is_one_line_of_difference():
  """Though every name behind it has another number."""
  more = NORMAL.replace("%6", "%7").replace(
    "  ROOT %7", "  %6 = f32[2]{0} negate(%5)\n  ROOT %7"
  )
  assert compare_programs.difference(NORMAL, more) == ["+  % = f32[2]{0} negate(%)"]


def test_a_program_of_one_side_only_differs():
  found = compare_programs.compare({"a": NORMAL, "b": NORMAL}, {"a": NORMAL})
  assert found["a"] == []
  assert len(found["b"]) == NORMAL.count("\n")


def test_a_constant_that_the_text_leaves_out_is_no_match():
  """Programs whose tables differ would look the same."""
  table = jnp.arange(32.0).reshape(4, 8) ** 2
  with pytest.raises(ValueError, match="so large"):
    normal_form(lambda x, y: x * jax.device_get(table))


def test_what_cannot_be_compared_is_said_in_one_line(tmp_path):
  """A folder without the code, and a revision that does not exist."""
  with pytest.raises(ValueError, match="cannot be compiled: ModuleNotFoundError"):
    compare_programs.compiled_by(tmp_path)
  with pytest.raises(ValueError, match="no-such-revision: "):
    compare_programs.compiled_at("no-such-revision")
