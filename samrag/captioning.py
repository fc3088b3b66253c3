"""Raw captions d_rc of image documents, by the teacher."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from samrag.arguments import CaptionArguments
from samrag.calls import Call, CallKind, Caption, Program, Reply, Sampling
from samrag.engines.base import Engine
from samrag.progress import progress
from samrag.schedule import Schedule, run
from samrag.schema import Document, Modality

_TRIES = 3


def raw_caption(document: Document, sampling: Sampling) -> Program[Document]:
    """Yield caption calls until one succeeds, a few times at most; return the document with what there is."""
    reply: Reply
    for index in range(_TRIES):
        (reply,) = yield [
            Call(
                CallKind.CAPTION_RAW,
                title=document.title,
                image=document.image,
                sampling=sampling,
                sample_index=index,
            )
        ]
        if isinstance(reply, Caption):
            return dataclasses.replace(document, caption=reply.text)
    return document


async def caption_documents(
    documents: Sequence[Document], engine: Engine, arguments: CaptionArguments, concurrency: int, label: str
) -> tuple[list[Document], int]:
    """Caption the images among `documents`; returns all documents in order, and how many images have no caption."""
    sampling = Sampling(arguments.temperature, arguments.max_tokens)
    result = list(documents)
    positions = [i for i, document in enumerate(documents) if document.modality is Modality.IMAGE]
    programs = (raw_caption(documents[i], sampling) for i in positions)
    with progress(f"captions {label[-24:]}", len(positions)) as advance:
        async for number, outcome in run(programs, engine, Schedule.CONCURRENT, concurrency):
            result[positions[number]] = outcome.value
            advance()
    return result, sum(document.modality is Modality.IMAGE and not document.caption for document in result)
