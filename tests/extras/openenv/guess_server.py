"""A server of OpenEnv with a game: guess a letter. `python guess_server.py SESSIONS` prints its port."""

import random
import socket
import sys
from typing import Any

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app

LETTERS = "abcd"


class Guess(Action):
    letter: str


class Hint(Observation):
    text: str
    asked: int = 0


class Guessing(Environment[Guess, Hint, State]):
    """The letter follows from the seed, or is given. A right guess is worth 1, each wrong one -0.25."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed: int | None = None, episode_id: str | None = None, **given: Any) -> Hint:
        self._letter = given.get("letter") or random.Random(seed).choice(LETTERS)
        self._state = State(episode_id=episode_id)
        return Hint(text=f"It is one of {LETTERS}.")

    def step(self, action: Guess, timeout_s: float | None = None, **given: Any) -> Hint:
        self._state.step_count += 1
        if action.letter == "!":
            raise ValueError("the board fell over")
        right = action.letter == self._letter
        said = "right" if right else "later" if action.letter < self._letter else "earlier"
        return Hint(text=said, asked=self._state.step_count, done=right, reward=1.0 if right else -0.25)

    @property
    def state(self) -> State:
        return self._state


if __name__ == "__main__":
    app = create_fastapi_app(Guessing, Guess, Hint, max_concurrent_envs=int(sys.argv[1]))
    listening = socket.create_server(("127.0.0.1", 0))
    print(listening.getsockname()[1], flush=True)
    uvicorn.Server(uvicorn.Config(app, log_level="warning")).run(sockets=[listening])
