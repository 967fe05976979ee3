"""The varying mesh axes of kernels' results inside of `shard_map`."""

import jax


def like(x: jax.Array, *others: jax.Array) -> jax.Array:
  """Marks `x` as varying along every mesh axis along which any of the others does."""
  missing = frozenset().union(*map(_axes, others)) - _axes(x)
  return jax.lax.pcast(x, tuple(sorted(missing)), to="varying") if missing else x


def _axes(x: jax.Array) -> frozenset[str]:
  return jax.typeof(x).manual_axis_type.varying
