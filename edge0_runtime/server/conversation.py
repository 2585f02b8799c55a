"""A conversation that any chat protocol asks to be answered: turns, tools, form of the answer; and the request it becomes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import Field

from edge0_runtime.sampling import Penalties, Sampling
from edge0_runtime.server.errors import ApiError
from edge0_runtime.server.exchange import GenerationRequest
from edge0_runtime.server.grammar import Grammar, json_grammar
from edge0_runtime.server.schema import Strict
from edge0_runtime.server.served import Served
from edge0_runtime.server.tools import Calling, calls_grammar

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class TemplateVariables(Strict):
    """What a request may tell a chat template; of these, a template reads some."""

    enable_thinking: bool | None = None
    thinking: bool | None = None
    preserve_thinking: bool | None = None
    reasoning_effort: Annotated[str | None, Field(min_length=1, max_length=16)] = None
    thinking_budget: Annotated[int | None, Field(ge=0, lt=2**31)] = None

    def given(self) -> dict[str, Any]:
        """Those that the request names."""
        return self.model_dump(exclude_none=True)


@dataclass(frozen=True)
class Names:
    """What a protocol calls the fields that errors name."""

    turns: str = "messages"
    tools: str = "tools"
    tool_choice: str = "tool_choice"
    format: str = "response_format"
    variables: str = "chat_template_kwargs"
    effort: str = "reasoning_effort"


@dataclass(frozen=True)
class Conversation:
    """What is to be answered.

    Attributes:
        turns: as chat templates know them, tool calls in OpenAI's form with their arguments as objects.
        calling: the tools, and whether to call them. schema: of the JSON that the answer must be; None: any text.
        variables: for the chat template. effort: of thinking, in OpenAI's words.
        continue_final: the last turn, the assistant's, goes on.
    """

    turns: Sequence[Mapping[str, Any]]
    calling: Calling = field(default_factory=Calling)
    schema: Any = None
    variables: Mapping[str, Any] = field(default_factory=dict)
    effort: Effort | None = None
    continue_final: bool = False
    names: Names = field(default_factory=Names)

    def prompt(self, served: Served) -> tuple[int, ...]:
        """Its token ids. Raises ApiError where this model can't be told all of it."""
        markup, names, tools = served.markup, self.names, self.calling.offered
        if tools and not markup.tools:
            raise ApiError(
                400, f"{names.tools}: this model's chat template takes no tools; leave them out", names.tools
            )
        for role, variable in (("tool_calls", "tool_calls"), ("tool_call_id", "tool")):
            if any(role in turn for turn in self.turns) and not markup.reads(variable):
                message = f"{names.turns}: this model's chat template has no turns of tools; leave them out"
                raise ApiError(400, message, names.turns)
        for name in self.variables:
            if not markup.reads(name):
                where = f"{names.variables}.{name}"
                raise ApiError(400, f"{where}: this model's chat template doesn't read it; leave it out", where)
        variables = dict(self.variables) | self._thinking(served)
        if tools:
            variables["tools"] = [dict(tool) for tool in tools]
        return served.conversation(self.turns, field=names.turns, continue_final=self.continue_final, **variables)

    def request(
        self, served: Served, *, sampling: Sampling, penalties: Penalties | None = None, **others: Any
    ) -> GenerationRequest:
        """As the server's own; `others` are fields of it. Raises ApiError where this model can't answer it."""
        prompt, tools = self.prompt(served), self.calling.offered
        return GenerationRequest(
            prompts=(prompt,),
            sampling=sampling,
            penalties=penalties or Penalties(),
            splitter=served.splitter(prompt, tools, one_call=not self.calling.parallel),
            grammar=self._grammar(served, prompt),
            **others,
        )

    def _grammar(self, served: Served, prompt: Sequence[int]) -> Grammar | None:
        names, markup = self.names, served.markup
        behind = markup.think_end if markup.opens_thinking(prompt) else ()
        if self.schema is not None:
            if self.calling.offered:
                raise ApiError(
                    400, f"{names.format}: not together with {names.tools}; leave one of them out", names.format
                )
            return Grammar(
                served.vocabulary(names.format), json_grammar(self.schema, names.format), names.format, behind
            )
        if not self.calling.constrained:
            return None
        where = names.tool_choice if self.calling.forced else names.tools
        vocabulary = served.vocabulary(where)
        return Grammar(vocabulary, calls_grammar(markup, vocabulary, self.calling, where), where, behind)

    def _thinking(self, served: Served) -> dict[str, Any]:
        """The effort in the template's own variables."""
        if self.effort is None:
            return {}
        if served.markup.reads("reasoning_effort"):
            return {"reasoning_effort": self.effort}
        for name in ("enable_thinking", "thinking"):
            if served.markup.thinks and served.markup.reads(name):
                return {name: self.effort != "none"}
        if self.effort == "none" and not served.markup.thinks:
            return {}
        where = self.names.effort
        raise ApiError(400, f"{where}: this model's thinking can't be set; leave it out", where)
