"""The engine that a run's configuration asks for."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from samrag.answering import recorded, teacher_backend
from samrag.arguments import RunArguments, TeacherArguments
from samrag.engines.base import Backend, Engine
from samrag.engines.recorded import Store
from samrag.errors import UserError
from samrag.prompts import PromptStyle


def _backend(arguments: RunArguments, teacher: TeacherArguments) -> Backend:
    root = Path(arguments.image_root)
    if arguments.engine == "api":
        return teacher_backend(teacher, root)
    if arguments.model_path is None:
        raise UserError("engine is local but model_path is not set; name the model folder, or use engine api.")
    from samrag.engines.local import LocalBackend

    return LocalBackend.load(
        arguments.model_path,
        adapter=arguments.adapter,
        image_root=root,
        batch_tokens=arguments.batch_tokens,
        max_batch=arguments.max_batch,
        num_threads=arguments.num_threads,
    )


@asynccontextmanager
async def load_engine(arguments: RunArguments, teacher: TeacherArguments) -> AsyncIterator[Engine]:
    """The engine behind its call store; both are closed at the end.

    Raises:
        UserError: the configuration names no model.
    """
    usual = PromptStyle.STUDENT if arguments.engine == "local" else PromptStyle.TEACHER
    style = PromptStyle(arguments.prompt_style or usual)
    backend = _backend(arguments, teacher)
    store = Store(Path(teacher.store))
    try:
        yield recorded(backend, store, Path(arguments.image_root), style)
    finally:
        await backend.close()
        store.close()
