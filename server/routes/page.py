"""The page at `/`: one static file, allowed to run its own script and to call this server, and nothing else."""

import base64
import hashlib
import re
from pathlib import Path

from starlette.responses import Response

_FILE = Path(__file__).with_name("page.html")


def page_response() -> Response:
    """The page. It holds no secrets: with an API key it asks the user for the key first."""
    text = _FILE.read_text(encoding="utf-8")
    [script] = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = (f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; img-src data:; "
              "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'")
    return Response(text, media_type="text/html", headers={
        "content-security-policy": policy, "x-content-type-options": "nosniff", "referrer-policy": "no-referrer",
        "cache-control": "no-cache"})
