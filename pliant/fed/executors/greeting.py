"""The first frames of a connection: each side proves to the other that it knows the job's token, which does not travel.

A mutual HMAC challenge: neither learns the token from it, and a recorded one is worth nothing. It does not protect what comes
after it: between machines that do not trust their network, use TLS.
"""

from __future__ import annotations

import hashlib
import hmac
import os
from typing import Any

from pliant.errors import CommError, HandshakeRefused
from pliant.fed.executors.wire import Frame, Kind, Link

PROTOCOL = 1
_NONCE = 16


async def greet(link: Link, token: str, who: dict[str, Any], payload_limit: int) -> Frame:
    """The executor's side; the server's welcome.

    Raises:
        HandshakeRefused: with the server's reason, or because it does not know the token.
        CommError: the connection was lost, or nothing came in time.
    """
    mine = nonce()
    link.send(Kind.HELLO, {**who, "protocol": PROTOCOL, "nonce": mine})
    challenge = (await link.receive(Kind.CHALLENGE)).body
    nonces = f"{mine} {checked_nonce(challenge.get('nonce'))}"
    if not is_proof(challenge.get("proof"), token, "server", nonces):
        link.send(Kind.REFUSED, {"why": "its token is not this job's: give it the job's --token-file"})
        link.close()
        raise HandshakeRefused("its token is another one: give this executor the job's --token-file")
    link.admit(payload_limit)
    link.send(Kind.PROOF, {"proof": proof(token, "executor", nonces)})
    return await link.receive(Kind.WELCOME)


async def answer(link: Link, token: str) -> dict[str, Any]:
    """The server's side: what the executor said of itself.

    Raises:
        HandshakeRefused: it does not know the token, or speaks another protocol.
        CommError: the connection was lost, or nothing came in time.
    """
    hello = (await link.receive(Kind.HELLO)).body
    if hello.get("protocol") != PROTOCOL:
        raise HandshakeRefused(
            f"it speaks protocol {hello.get('protocol')!r:.20}, and this server {PROTOCOL}: "
            "install one version everywhere"
        )
    mine = nonce()
    nonces = f"{checked_nonce(hello.get('nonce'))} {mine}"
    link.send(Kind.CHALLENGE, {"nonce": mine, "proof": proof(token, "server", nonces)})
    shown = (await link.receive(Kind.PROOF)).body.get("proof")
    if not is_proof(shown, token, "executor", nonces):
        raise HandshakeRefused("it does not know this job's token: give it the job's --token-file")
    return hello


def proof(token: str, role: str, nonces: str) -> str:
    """What only who knows the token can say of these nonces."""
    return hmac.new(token.encode(), f"{PROTOCOL} {role} {nonces}".encode(), hashlib.sha256).hexdigest()


def is_proof(given: object, token: str, role: str, nonces: str) -> bool:
    return isinstance(given, str) and hmac.compare_digest(given.encode(), proof(token, role, nonces).encode())


def nonce() -> str:
    return os.urandom(_NONCE).hex()


def checked_nonce(given: object) -> str:
    """Raises CommError where it is none."""
    if not isinstance(given, str) or len(given) != 2 * _NONCE or not given.isalnum():
        raise CommError("its handshake is damaged: that is no nonce")
    return given
