"""Differential privacy: accounting (`epsilon`), a site's account and what it covers (`account`), DP-SGD (`dp_sgd`).

They know settings, errors, randomness, torch and Opacus; nothing of methods, generators, sites or studies, which
hand over networks, losses per image and a site's account. Beside them `sealing`: bytes that only one site can read.
"""
