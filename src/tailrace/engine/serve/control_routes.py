"""The routes of `Control`, as in vLLM, and PipelineRL's two. All need the token."""

from typing import Annotated, Any

from fastapi import APIRouter, Body, HTTPException, Query

from tailrace.engine.serve.control import Control, PauseMode, SleepMode
from tailrace.engine.serve.protocol import Name
from tailrace.engine.serve.requests import Requests
from tailrace.engine.serve.versions import Versions

Label = Annotated[Name, Body(embed=True)]
Ids = Annotated[list[str] | None, Body(embed=True)]


def control_routes(control: Control, requests: Requests, versions: Versions) -> APIRouter:
    """Make the router."""
    router = APIRouter()

    @router.post("/pause")
    async def pause(mode: PauseMode = "abort", clear_cache: bool = True) -> dict[str, str]:
        await control.pause(mode, clear_cache=clear_cache)
        return {"status": "paused"}

    @router.post("/resume")
    async def resume() -> dict[str, str]:
        await control.resume()
        return {"status": "resumed"}

    @router.get("/is_paused")
    async def is_paused() -> dict[str, bool]:
        return {"is_paused": control.paused}

    @router.post("/sleep")
    async def sleep(
        level: Annotated[int, Query(ge=1, le=2)] = 1, mode: SleepMode = "abort"
    ) -> dict[str, Any]:
        await control.sleep(mode)
        return {"status": "sleeping", "level": level}

    @router.post("/wake_up")
    async def wake_up() -> dict[str, str]:
        await control.resume()
        return {"status": "awake"}

    @router.get("/is_sleeping")
    async def is_sleeping() -> dict[str, bool]:
        return {"is_sleeping": control.asleep}

    @router.post("/abort_requests")
    async def abort_requests(request_ids: Ids = None) -> dict[str, Any]:
        return {"status": "aborted", "aborted": requests.abort(request_ids or None)}

    @router.post("/inference/v1/abort_requests")
    async def abort_generations(request_ids: Annotated[list[str], Body(embed=True)]) -> None:
        requests.abort(request_ids)

    @router.post("/init_weight_transfer_engine")
    async def init_weight_transfer(init_info: Annotated[dict[str, Any], Body(embed=True)]) -> dict[str, str]:
        control.init_transfer(init_info)
        return {"message": "Weight transfer initialized"}

    @router.post("/start_weight_update")
    async def start_weight_update() -> dict[str, str]:
        await control.start_update()
        return {"message": "Weight update started"}

    @router.post("/update_weights")
    async def update_weights(update_info: Annotated[dict[str, Any], Body(embed=True)]) -> dict[str, str]:
        await control.update(update_info)
        return {"message": "Weights updated"}

    @router.post("/finish_weight_update")
    async def finish_weight_update(
        weight_version: Annotated[Name | None, Body(embed=True)] = None,
    ) -> dict[str, str]:
        await control.finish_update(weight_version)
        return {"message": "Weight update finished"}

    @router.post("/update_weight_version")
    async def update_weight_version(new_version: Label) -> dict[str, Any]:
        versions.name(new_version)
        return {"success": True, "new_version": new_version}

    @router.get("/weight_info")
    async def weight_info() -> dict[str, str]:
        return {"weight_version": versions.label}

    @router.post("/init_process_group")
    async def init_process_group(init_info: Annotated[dict[str, Any], Body()]) -> dict[str, str]:
        control.init_transfer(init_info)
        return {"status": "ok"}

    @router.post("/request_weight_update")
    async def request_weight_update(update_info: Annotated[dict[str, Any], Body()]) -> dict[str, str]:
        version = update_info.get("version")
        if not isinstance(version, int):
            raise HTTPException(400, "version must be a whole number")
        await control.update_at_once(update_info, str(version))
        return {"status": "ok"}

    return router
