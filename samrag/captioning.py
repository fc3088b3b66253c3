"""Raw captions d_rc of image documents, by the teacher."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from samrag.arguments import CaptionArguments
from samrag.calls import Call, CallKind, Caption, Failure, Program, Reply, Sampling
from samrag.engines.base import Engine
from samrag.errors import UserError
from samrag.progress import progress
from samrag.schedule import Schedule, run
from samrag.schema import Document, Modality

_TRIES = 3


def raw_caption(document: Document, sampling: Sampling) -> Program[Reply]:
    """Yield caption calls until one succeeds, a few times at most; return the last reply."""
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
            break
    return reply


def caption_programs(documents: Sequence[Document], arguments: CaptionArguments) -> Iterator[Program[Reply]]:
    """One program for each image among the documents, in their order."""
    sampling = Sampling(arguments.temperature, arguments.max_tokens)
    return (raw_caption(document, sampling) for document in documents if document.modality is Modality.IMAGE)


async def caption_documents(
    documents: Sequence[Document], engine: Engine, arguments: CaptionArguments, concurrency: int, label: str
) -> tuple[list[Document], int]:
    """Caption the images among `documents`; returns all documents in order, and how many images have no caption.

    Raises:
        UserError: there are images, and none of them got a caption.
    """
    result, failed = list(documents), dict[int, Reply]()
    positions = [i for i, document in enumerate(documents) if document.modality is Modality.IMAGE]
    programs, done = caption_programs(documents, arguments), 0
    with progress(f"captions {label[-24:]}", len(positions)) as advance:
        async for number, outcome in run(programs, engine, Schedule.CONCURRENT, concurrency):
            if isinstance(outcome.value, Caption):
                position = positions[number]
                result[position] = dataclasses.replace(documents[position], caption=outcome.value.text)
            else:
                failed[number] = outcome.value
            done += 1
            advance(note=engine.meter.note(len(positions) - done))
    if positions and len(failed) == len(positions):
        first = failed[min(failed)]
        why = f"{first.reason}: {first.detail}" if isinstance(first, Failure) else "no caption"
        raise UserError(
            f"none of the {len(positions)} images of {label} got a caption (the first: {why}); "
            "check image_root, teacher_url and teacher_model."
        )
    return result, len(failed)
