"""What a certificate looks like: the published JSON Schema is made from these classes.

Further entries may come in the same version; what is here stays as it is.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from dpspan.accounting.certificate import FORMAT, VERSION

_ID = "https://json-schema.org/draft/2020-12/schema"
_Count = Annotated[int, Field(ge=1)]
_Amount = Annotated[float, Field(ge=0)]
_Digest = Annotated[str, Field(pattern="^[0-9a-f]{64}$", description="SHA-256")]


class _Part(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)


class Promise(_Part):
    """An (ε, δ)."""

    epsilon: Annotated[float, Field(gt=0)]
    delta: Annotated[float, Field(gt=0, lt=1)]


class Accountant(_Part):
    """Who computed ε; `fallback` if it was not the one that was chosen."""

    chosen: str
    used: str
    fallback: bool
    value_discretization_interval: Annotated[float, Field(gt=0)] | None


class Kind(_Part):
    """An event of dp_accounting by its name, with its fields."""

    kind: str


class Event(_Part):
    """So many releases of one kind."""

    count: _Count
    text: str
    event: Kind


class Public(_Part):
    """What was taken to be public."""

    name: str
    count: _Count
    sha256: str
    detail: str


class Digests(_Part):
    """Of the events, and of the settings of the run that the certificate belongs to."""

    ledger: _Digest
    configuration: _Digest | None = None


class Audit(_Part):
    """What canaries in a rehearsal of the same settings have measured: ε is at least so much."""

    epsilon_at_least: _Amount
    confidence: Annotated[float, Field(gt=0, lt=1)]
    delta: Annotated[float, Field(ge=0, lt=1)]
    canaries: _Count


class Certificate(_Part):
    """What a private run guarantees, and how that was spent."""

    format: Literal["dpspan.certificate"]
    version: Literal[1]
    created: str
    private: bool
    not_private_because: list[str]
    epsilon: _Amount | Literal["infinity"]
    delta: Annotated[float, Field(gt=0, lt=1)]
    adjacency: str
    discloses_number_of_records: bool = False
    search: str | None = None
    audit: Audit | None = None
    budget: Promise | None
    accountant: Accountant
    training: dict[str, Any]
    steps: Annotated[int, Field(ge=0)]
    events: list[Event]
    public: list[Public]
    warnings: list[str]
    versions: dict[str, str]
    digests: Digests | None = None


def certificate_schema() -> dict[str, Any]:
    """The JSON Schema of a certificate."""
    return {"$schema": _ID, **Certificate.model_json_schema()}


def parse_certificate(document: Any) -> Certificate:
    """The document, checked; ValueError naming the first entry that is not as it should be."""
    try:
        return Certificate.model_validate(document)
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        where = ".".join(map(str, first["loc"])) or "the document"
        raise ValueError(
            f"This is no certificate of dpspan ({FORMAT}, version {VERSION}): {where}: "
            f"{first['msg']}."
        ) from None
