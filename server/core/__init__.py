"""What both doors stand on: requests, admission, deadlines and errors, free of gRPC and HTTP."""

from server.core.errors import HTTP_CODES, ServiceError, Status
from server.core.generation import Generation
from server.core.identity import ModelIdentity, identify
from server.core.requests import Choice, GenerateRequest, Receipt, RequestRecord
from server.core.routes import Routes, RouteState
from server.core.service import Load, Service

__all__ = [
    "HTTP_CODES",
    "Choice",
    "GenerateRequest",
    "Generation",
    "Load",
    "ModelIdentity",
    "Receipt",
    "RequestRecord",
    "RouteState",
    "Routes",
    "Service",
    "ServiceError",
    "Status",
    "identify",
]
