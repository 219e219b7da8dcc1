"""`Play`: textarena's side of a chain, in its own process (`game_processes`), for its games use Python's generator."""

import contextlib
import copy
import io
import random
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

import numpy as np
import textarena
from textarena.envs.registration import ENV_REGISTRY

from agentfactory.worlds.game_processes.refused import Refused
from agentfactory.worlds.textarena.games import MOVES, family, players

_MOST_MOVES = 1000
_RESIGNS = ("[resign]",) * 2
"""Two illegal moves in a row, with which textarena ends a game."""


class Play:
    def names(self) -> list[str]:
        """Return the names of the games that can be played."""
        return sorted(name for name in ENV_REGISTRY if players(name))

    def reset(self, game: str, options: dict[str, Any], opponent: str, plays: str, seed: int) -> dict[str, Any]:
        """Begin a game, and let the opponent make its first moves. Raises Refused."""
        random.seed(seed)
        np.random.seed(seed % 2**32)
        try:
            # without wrappers, which repeat the whole conversation in each observation
            self._environment = textarena.make(f"{game}-raw", **options)
        except TypeError as error:
            raise Refused("options", f"{game} refuses {options}: {error}", "correct the options") from error
        with contextlib.redirect_stdout(io.StringIO()):  # some print what they try while they make a puzzle
            self._environment.reset(num_players=players(game), seed=seed)
        self._state = self._environment.state
        second = players(game) == 2 and (plays == "second" or (plays == "both" and seed % 2 == 1))
        self._me, self._opponent, self._moves = int(second), opponent, MOVES.get(family(game), ())
        self._rng = random.Random(seed)
        self._answer()
        return self._shown()

    def act(self, move: str) -> dict[str, Any]:
        """Make a move, and let the opponent move until it is the agent's turn."""
        self._environment.step(move if "[" in move or "]" in move else f"[{move}]")
        illegal = self._state.error_count > 0 or bool(self._state.game_info[self._me]["invalid_move"])
        self._answer()
        return {**self._shown(), "illegal": illegal}

    def resign(self) -> float:
        """End the game by illegal moves, unless it has ended; return the agent's reward."""
        for move in _RESIGNS:
            if not self._state.done:
                self._environment.step(move)
        return self._reward()

    def legal_move(self, moves: Sequence[str]) -> str | None:
        """Return the first of `moves` that is legal; None if none is."""
        # nothing reads these, and they grow
        self._state.logs.clear()
        self._state.observations[1 - self._me] = []
        trial, generator = copy.deepcopy(self._environment), random.getstate()
        try:
            for move in moves:
                with contextlib.suppress(ValueError, IndexError, KeyError):  # textarena's parsers on other moves
                    trial.step(move)
                    if trial.state.error_count == 0 and not trial.state.game_info[self._state.current_player_id].get(
                        "invalid_move"
                    ):
                        return move
                trial.state.error_count, trial.state.made_invalid_move = 0, False
            return None
        finally:
            random.setstate(generator)

    def _answer(self) -> None:
        for _ in range(_MOST_MOVES):
            if self._state.done or self._state.current_player_id == self._me:
                return
            moves = self._rng.sample(self._moves, len(self._moves)) if self._opponent == "random" else self._moves
            move = self.legal_move(moves)
            if move is None:
                raise RuntimeError("the opponent found no legal move")
            self._environment.step(move)
        raise RuntimeError(f"the opponent made {_MOST_MOVES} moves in a row")

    def _reward(self) -> float:
        rewards, _ = self._environment.close()
        return float(rewards[self._me])

    def _shown(self) -> dict[str, Any]:
        """Return the new messages for the agent, whether the game is `done`, its `reward` if so, and the `anchor`."""
        messages, self._state.observations[self._me] = self._state.observations[self._me], []
        texts = [self._text(sender, text) for sender, text, _ in messages if sender != self._me]
        done = bool(self._state.done)
        anchor = blake2b(repr(self._state.game_state).encode("utf-8", "replace"), digest_size=16).hexdigest()
        reason = self._state.game_info[self._me].get("reason") if done else None
        return {
            "text": "\n".join(filter(None, [*texts, reason])),
            "done": done,
            "reward": self._reward() if done else None,
            "anchor": anchor,
        }

    def _text(self, sender: int, text: str) -> str:
        name = self._state.role_mapping.get(sender, f"Player {sender}")
        return text.strip("\n") if sender == textarena.GAME_ID else f"{name}: {text}"
