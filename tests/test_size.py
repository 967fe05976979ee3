"""The command that counts the code."""

from dev import size


def test_an_import_closure_has_what_is_imported_and_its_packages():
  found = {str(p.relative_to(size.ROOT)) for p in size.import_closure(["tlt_jax.metrics"])}
  assert {"tlt_jax/__init__.py", "tlt_jax/metrics.py", "tlt_jax/writing.py"} <= found
  assert not [path for path in found if not path.startswith("tlt_jax/")]
