"""Megatron's paths: ``megatron.core.inference.X`` is ``megatron_runtime.X``.

The modules of this folder re-export classes of this package under the paths and names that they have in Megatron. They
have no code of their own, apart from two small helpers whose names begin with an underscore.

The package has this folder in its search path, after its own folder: ``import megatron_runtime.engines`` finds
``compat/engines/``. So the paths are plain modules in one folder, which are imported only on demand, and no import hook
or alias in ``sys.modules`` is needed. Paths that are the same in both, such as ``megatron_runtime.config``, are not
here. ``docs/megatron-names.md`` lists all public names of Megatron, and those that are left out, with the reason.

Code of this package does not import from here. Type checkers do not follow the search path: they find these modules as
``megatron_runtime.compat.engines``, which works too.
"""
