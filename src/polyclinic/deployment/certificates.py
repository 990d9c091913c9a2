"""Certificates of the kits. NVFlare imports this builder by its name, when it makes them."""

from __future__ import annotations

import datetime
from typing import Any

from nvflare.lighter.impl import cert

#: before now: a hospital whose clock is behind must not find the certificate of the server not yet valid
ALREADY_VALID = datetime.timedelta(days=1)


class CertBuilder(cert.CertBuilder):
    """NVFlare's own, whose certificates are valid since yesterday."""

    @staticmethod
    def _generate_cert(*arguments: Any, **settings: Any) -> Any:
        begins = settings.get("not_valid_before") or datetime.datetime.now(datetime.UTC)
        settings["not_valid_before"] = begins - ALREADY_VALID
        return cert.CertBuilder._generate_cert(*arguments, **settings)
