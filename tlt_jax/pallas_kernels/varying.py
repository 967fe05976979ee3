"""What kernels' results lack inside of `shard_map`: that they differ between devices."""

import jax


def like(x: jax.Array, *others: jax.Array) -> jax.Array:
  """Marks `x` as varying along every mesh axis along which any of the others does."""
  axes = lambda y: jax.typeof(y).manual_axis_type.varying
  missing = frozenset().union(*map(axes, others)) - axes(x)
  return jax.lax.pcast(x, tuple(sorted(missing)), to="varying") if missing else x
