"""Sweeps: a study is resolved, its space is searched with Optuna, and every replicate is kept.

:mod:`~rayhive.sweep.resolve` turns a study into a :class:`~rayhive.sweep.resolve.ResolvedStudy`,
:mod:`~rayhive.sweep.space` defines its configurations, :mod:`~rayhive.sweep.trial_book` keeps the
trials in Optuna's storage, :mod:`~rayhive.sweep.replicate_runner` runs one replicate, and
:mod:`~rayhive.sweep.driver` asks and tells. Ray stays behind :mod:`~rayhive.sweep.target`.

The package itself can be called: ``rayhive.sweep(study)`` is :func:`rayhive.api.sweep`.
"""
