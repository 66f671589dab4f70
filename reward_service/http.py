"""The reward service over HTTP: a Ray Serve deployment of the pool, protected by a token."""

from __future__ import annotations

import asyncio
import hmac
import json
from collections.abc import Mapping
from typing import Any

from ray import serve
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from reward_service.processes import RewardPool
from reward_service.rows import item_of, result_row

MAX_BODY = 64 * 2**20  # bytes of one request


class RewardHTTP:
    """POST /score takes a JSON list of items, or {"items": [...]}, and returns results in order.

    GET /stats returns the counts of the pool. Every request must carry the token as a bearer token.
    """

    def __init__(self, config: Mapping[str, Any], workers: int, token: str):
        self.token, self.pool = token.encode(), RewardPool(config, workers)

    async def __call__(self, request: Request) -> Response:
        kind, _, token = request.headers.get("authorization", "").partition(" ")
        if kind.lower() != "bearer" or not hmac.compare_digest(token.strip().encode(), self.token):
            return JSONResponse(
                {"error": "missing or wrong token; send Authorization: Bearer TOKEN"}, 401
            )
        if request.method == "GET" and request.url.path == "/stats":
            return JSONResponse(self.pool.report())
        if request.method != "POST" or request.url.path != "/score":
            return JSONResponse({"error": "expected POST /score or GET /stats"}, 404)
        body = bytearray()
        async for chunk in request.stream():
            body += chunk
            if len(body) > MAX_BODY:
                return JSONResponse({"error": f"the request is larger than {MAX_BODY} bytes"}, 413)
        try:
            rows = json.loads(body)
            rows = rows["items"] if isinstance(rows, dict) else rows
            items = [item_of(row, f"item {number}", number) for number, row in enumerate(rows)]
        except (ValueError, KeyError, TypeError) as error:
            return JSONResponse({"error": f"{type(error).__name__}: {error}"}, 400)
        results = await asyncio.to_thread(self.pool.score, items)
        rows = [
            {
                **result_row(item, result),
                "reward": result.total if result.status == "ok" else None,
                "parts": result.parts,
            }
            for item, result in zip(items, results, strict=True)
        ]
        return Response(
            json.dumps(rows), media_type="application/json"
        )  # ASCII: lone surrogates stay escaped


def deployment(config: Mapping[str, Any], workers: int, token: str) -> Any:
    """The Serve application. Serve answers 503 if more than 64 requests are waiting."""
    return serve.deployment(
        RewardHTTP,
        name="RewardHTTP",
        num_replicas=1,
        max_ongoing_requests=16,
        max_queued_requests=64,
        ray_actor_options={"num_cpus": 0},
    ).bind(config, workers, token)
