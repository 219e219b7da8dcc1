"""The tool `computer_use` of Qwen's GUI agents, in a browser and on pictures of screens.

Its actions and arguments are from Qwen2.5-VL's and Qwen3-VL's cookbooks; the descriptions are ours."""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from agentfactory import Environment, ModelView, finish, tool
from agentfactory.tools.images.decode import size_of
from agentfactory.worlds.screens.screen import Screen

Action = Literal[
    "key",
    "type",
    "mouse_move",
    "left_click",
    "left_click_drag",
    "right_click",
    "middle_click",
    "double_click",
    "triple_click",
    "scroll",
    "hscroll",
    "wait",
    "terminate",
    "answer",
]
Place = Annotated[list[float], Field(min_length=2, max_length=2)]
_CLICKS = ("left_click", "right_click", "middle_click", "double_click", "triple_click")
_NEEDED = {
    "key": "keys",
    "type": "text",
    "answer": "text",
    "scroll": "pixels",
    "hscroll": "pixels",
    "wait": "time",
    "terminate": "status",
    **dict.fromkeys(("mouse_move", "left_click_drag", *_CLICKS), "coordinate"),
}
"""Action -> the argument that it needs."""
_KEYS = {
    **{name.lower(): name for name in ("Enter", "Tab", "Backspace", "Delete", "Insert", "Home", "End", "Escape")},
    **{name.lower(): name for name in ("Control", "Alt", "Shift", "Meta", "PageUp", "PageDown")},
    **{f"f{number}": f"F{number}" for number in range(1, 13)},
    **{side.lower(): f"Arrow{side}" for side in ("Up", "Down", "Left", "Right")},
    **{"ctrl": "Control", "cmd": "Meta", "command": "Meta", "win": "Meta", "return": "Enter", "esc": "Escape"},
    **{"del": "Delete", "pgup": "PageUp", "pgdn": "PageDown", "space": "Space"},
}
"""Key names as the models write them, in lower case -> browsers' names."""


@dataclass(frozen=True)
class Call:
    """A call of `computer_use`, with the argument that its action needs."""

    action: Action
    keys: Sequence[str] = ()
    text: str = ""
    coordinate: Sequence[float] | None = None
    pixels: float = 0.0
    time: float = 0.0
    status: str = ""


class _ComputerUse(ABC):
    """Base class with the tool."""

    @tool
    async def computer_use(
        self,
        action: Action,
        keys: list[str] | None = None,
        text: str | None = None,
        coordinate: Place | None = None,
        pixels: Annotated[float, Field(allow_inf_nan=False)] | None = None,
        time: Annotated[float, Field(gt=0, le=10)] | None = None,
        status: Literal["success", "failure"] | None = None,
    ) -> Any:
        """Act on the screen with mouse and keyboard. The picture shows the screen as it is now: take the places of what
        you act on from it, and click in the middle of buttons, links and icons. What you did may take a moment to show:
        wait and look again.

        Args:
            action: key presses the keys in order, and releases them in reverse. type types text. mouse_move moves the
                mouse to a place. left_click, right_click, middle_click, double_click and triple_click click there.
                left_click_drag drags from where the mouse is to a place. scroll and hscroll turn the mouse's wheel.
                wait waits. terminate ends the task and says how it went. answer answers a question, and ends the task.
            keys: For key, such as ["ctrl", "a"].
            text: For type and answer.
            coordinate: Place as [x, y], from the left edge and from the top, {coordinates}. For the mouse's actions.
            pixels: For scroll, how far up; below 0, down. For hscroll, how far right; below 0, left.
            time: For wait, in seconds.
            status: For terminate.
        """
        given = {"keys": keys, "text": text, "coordinate": coordinate, "pixels": pixels, "time": time, "status": status}
        needed = _NEEDED[action]
        if given[needed] is None:
            raise ValueError(f"{needed}: {action} needs it")
        return await self._act(Call(action, **{name: value for name, value in given.items() if value is not None}))

    @abstractmethod
    async def _act(self, call: Call) -> Any:
        """Execute the call, and return the tool's result."""


class ComputerUse(_ComputerUse, Screen):
    """`Screen` with the single tool of Qwen's agents: a recipe needs `allow: [computer_use]`.

    Args:
        width: see Screen, as all that follow.
        height: of the page, in CSS pixels.
        scale: pixels of the picture per CSS pixel.
        seconds: how long the page may take for an action.
        allowed: origins that pages may reach.
        executable: Chromium's program.
    """

    async def _act(self, call: Call) -> Any:
        place = None if call.coordinate is None else self._place(call.coordinate)
        match call.action:
            case "key":
                return await self.key("+".join(_KEYS.get(key.lower(), key) for key in call.keys))
            case "type":
                return await self.type(call.text)
            case "scroll":
                return await self._wheel(0, -call.pixels / self._scale, place)
            case "hscroll":
                return await self._wheel(call.pixels / self._scale, 0, place)
            case "wait":
                return await self.wait(call.time)
            case "terminate":
                return await self.done(call.status)
            case "answer":
                return await self.done(call.text)
        assert place is not None  # the others need one
        match call.action:
            case "mouse_move":
                return await self._point_at(place)
            case "left_click_drag":
                return await self._drag(None, place)
            case "right_click":
                return await self._press(*place, button="right")
            case "middle_click":
                return await self._press(*place, button="middle")
        return await self._press(*place, {"double_click": 2, "triple_click": 3}.get(call.action, 1))

    def _place(self, coordinate: Sequence[float]) -> tuple[float, float]:
        try:
            return self._at(*coordinate)
        except ValueError as error:
            raise ValueError(f"coordinate{str(error).removeprefix('x, y')}") from None


class Grounding(_ComputerUse, Environment):
    """A screenshot, on which the model acts once. The reward is 1 for a click in the row's `box`, else 0."""

    def __init__(self) -> None:
        self._view = ModelView()
        self._size = (0, 0)
        self._box: Sequence[float] = ()
        self._clicked = self._hit = False

    def reset(self, images: list[Any], box: list[float], model_view: dict[str, Any] | None = None, **task: Any) -> Any:
        """Begin with the row's first image.

        Args:
            images: the screenshot.
            box: left, top, right and bottom edge of the element to click, in pixels of the image file.
            model_view: the model's coordinate format.
            task: other fields of the row.

        Raises:
            ValueError: `box` is not a box, or there is no image.
        """
        if len(box) != 4 or not all(map(math.isfinite, box)) or box[0] >= box[2] or box[1] >= box[3]:
            raise ValueError(f"box: got {box}; it is [left, top, right, bottom] in pixels")
        if not images:
            raise ValueError("images: a row needs one")
        self._view, self._size, self._box = ModelView.of(model_view), size_of(images[0]), box
        self._clicked = self._hit = False
        width, height = self._size
        return f"The screen has {width} x {height} pixels." if self._view.needs_sizes and model_view else None

    async def _act(self, call: Call) -> Any:
        result: dict[str, Any] = {"observation": "Done."}
        if call.coordinate is not None:
            try:
                x, y = self._view.point_in(call.coordinate, self._size)
            except ValueError as error:
                raise ValueError(f"coordinate: {error}") from None
            left, top, right, bottom = self._box
            self._clicked = call.action in _CLICKS
            self._hit = self._clicked and left <= x <= right and top <= y <= bottom
            result |= {"places": [[round(x, 2), round(y, 2)]], "size": list(self._size)}
        return finish(result)

    def reward(self) -> dict[str, float]:
        """Return `reward` and `success` (1 if the click was in the box) and `clicked` (1 if there was a click)."""
        hit = float(self._hit)
        return {"reward": hit, "success": hit, "clicked": float(self._clicked)}
