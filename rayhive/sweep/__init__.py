"""The sweep: a study is read, its space searched with Optuna, every replicate kept.

:mod:`~rayhive.sweep.study` reads a study, :mod:`~rayhive.sweep.space` says which configurations
there are, :mod:`~rayhive.sweep.trial_book` keeps the trials in Optuna's storage,
:mod:`~rayhive.sweep.replicate_runner` runs one repetition, :mod:`~rayhive.sweep.driver` asks and
tells. Nothing here imports Ray: the cluster is handed in.
"""
