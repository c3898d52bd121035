"""A real browser, Debian's chromium, without a window."""

from __future__ import annotations

import base64
import hashlib
import re
import shutil
import subprocess

import pytest

CHROMIUM = shutil.which("chromium")
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium: apt-get install chromium")
DARK = "--blink-settings=preferredColorScheme=0"
LIGHT = "--blink-settings=preferredColorScheme=1"


def chromium(page, profile, *options):
    """Open a page; give what the browser prints."""
    command = [
        CHROMIUM,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--no-first-run",
        f"--user-data-dir={profile}",
        *options,
        page.as_uri(),
    ]
    done = subprocess.run(command, capture_output=True, timeout=120, check=True)
    return done.stdout.decode()


def ask(page, profile, script, *options):
    """Run JavaScript in a page, whose policy is widened for it alone, and give what it calls ``answer`` with."""
    body = f"const answer = (v) => {{ document.body.dataset.answer = String(v); }};\n{script}\n"
    digest = base64.b64encode(hashlib.sha256(body.encode()).digest()).decode()
    text = page.read_text(encoding="utf-8")
    assert "script-src 'sha256-" in text
    text = text.replace("script-src ", f"script-src 'sha256-{digest}' ", 1)
    asked = page.with_suffix(".asked.html")
    asked.write_text(text.replace("</body>", f"<script>{body}</script></body>"), encoding="utf-8")
    found = re.search(r'<body[^>]* data-answer="([^"]*)"', chromium(asked, profile, "--dump-dom", *options))
    assert found is not None, "the script did not answer"
    return found.group(1)
