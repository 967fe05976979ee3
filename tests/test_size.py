"""The command that counts the code."""

from dev import size


def test_an_import_closure_has_what_is_imported_and_its_packages():
  found = {str(p.relative_to(size.ROOT)) for p in size.import_closure(["tlt_jax.metrics"])}
  assert {"tlt_jax/__init__.py", "tlt_jax/metrics.py", "tlt_jax/writing.py"} <= found
  assert not [path for path in found if not path.startswith("tlt_jax/")]


def test_sizes_are_printed(capsys):
  size.main()
  printed = capsys.readouterr().out
  assert len(printed.splitlines()) == len(size.PARTS) + len(size.CLOSURES)
  for modules in size.CLOSURES.values():
    assert all(map(size.find_module, modules))
