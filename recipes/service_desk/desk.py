"""A service desk: orders with a policy, a customer who is right by construction, and the reward of a conversation."""

import random
from collections.abc import Generator
from typing import Any

from agentfactory import Environment, finish, reward, tool

POLICY = """You work at the service desk of an online shop.
- Look the order up before you answer. For that, ask the customer for the code of the order.
- An order that is processing can be cancelled. A delivered order can be returned. Nothing else may be changed.
- After a cancellation or a return, tell the customer the refund: the price in euros.
- If the wish is only about the status of the order, tell the status, and change nothing.
- If the policy does not allow the wish, say that it is not possible, and change nothing."""
ITEMS = ("lamp", "desk", "chair", "shelf", "clock", "rug")
STATUSES = ("processing", "shipped", "delivered")
WISHES = {
    "cancel": "Please cancel order {order}.",
    "return": "I want to return order {order}.",
    "track": "What is the status of order {order}?",
}
ALLOWED = {"cancel": ("processing", "cancelled"), "return": ("delivered", "returned")}
"""Wish -> the status that it needs, and the status after it."""
REFUSAL = "not possible"
POSSIBLE = 0.7
"""Probability that a wish is made possible; it may be so by chance, too."""
ORDERS = 4
"""Orders in a chain's database."""


def make_task(rng: random.Random) -> dict[str, Any]:
    """Return a row: the customer's `question`, and the database, wish and code that the desk, the customer and the
    reward read."""
    numbers = rng.sample(range(10, 100), ORDERS)
    orders = {
        str(number): {
            "code": str(rng.randrange(10, 100)),
            "item": rng.choice(ITEMS),
            "price": rng.randrange(10, 100),
            "status": rng.choice(STATUSES),
        }
        for number in numbers
    }
    order, wish = str(numbers[0]), rng.choice(list(WISHES))
    if wish in ALLOWED and rng.random() < POSSIBLE:
        orders[order]["status"] = ALLOWED[wish][0]
    return {"question": WISHES[wish].format(order=order), "orders": orders, "order": order, "wish": wish}


def make_tasks(count: int, seed: int) -> list[dict[str, Any]]:
    """Return `count` rows; a seed always gives the same ones."""
    rng = random.Random(seed)
    return [make_task(rng) for _ in range(count)]


def solution(orders: dict[str, Any], order: str, wish: str) -> tuple[str, str]:
    """Return the status of the order when the policy was followed, and what the customer must be told."""
    found = orders[order]
    if wish == "track":
        return found["status"], found["status"]
    needed, after = ALLOWED[wish]
    return (after, str(found["price"])) if found["status"] == needed else (found["status"], REFUSAL)


class ServiceDesk(Environment):
    """A chain's orders. Reward: 1 if the customer's order was looked up, and every order has the status that the policy
    gives it, else 0."""

    def reset(self, orders: dict[str, Any], order: str, wish: str, **task: Any) -> None:
        """Copy the row's orders."""
        self.orders = {number: dict(fields) for number, fields in orders.items()}
        self.wanted = {number: fields["status"] for number, fields in orders.items()}
        self.wanted[order] = solution(orders, order, wish)[0]
        self.order, self.seen = order, set[str]()

    def _find(self, order: str, code: str) -> dict[str, Any]:
        found = self.orders.get(order)
        if found is None:
            raise ValueError(f"There is no order {order}.")
        if found["code"] != code:
            raise ValueError(f"Wrong code for order {order}.")
        self.seen.add(order)
        return found

    @tool
    def look_up(self, order: str, code: str) -> str:
        """Return the item, price and status of an order.

        Args:
            order: The number of the order.
            code: Its code, which the customer knows.
        """
        found = self._find(order, code)
        return f"{found['item']}, {found['price']} euros, {found['status']}"

    @tool
    def change(self, order: str, code: str, status: str) -> str:
        """Set the status of an order.

        Args:
            order: The number of the order.
            code: Its code, which the customer knows.
            status: cancelled or returned.
        """
        if status not in ("cancelled", "returned"):
            raise ValueError("The status must be cancelled or returned.")
        self._find(order, code)["status"] = status
        return "changed"

    def reward(self) -> float:
        """Return whether the order was looked up and the final state is right."""
        state = {number: fields["status"] for number, fields in self.orders.items()}
        return float(self.order in self.seen and state == self.wanted)


PATIENCE = 3
"""Messages of the desk that the customer does not understand before giving up."""


def customer(orders: dict[str, Any], order: str, wish: str) -> Generator[Any, str, None]:
    """Give the code when asked for it, and leave with an answer to the wish, which the row's question has told."""
    said = yield None
    for _ in range(PATIENCE):
        if "code" in said.casefold():
            said = yield f"The code is {orders[order]['code']}."
        elif is_answer(said, wish):
            break
        else:
            said = yield f"That does not help me. {WISHES[wish].format(order=order)}"
    yield finish("Thank you. Goodbye.")


def is_answer(said: str, wish: str) -> bool:
    """Return whether a message answers the wish, rightly or not."""
    told = said.casefold()
    answers = STATUSES if wish == "track" else (REFUSAL, "euros", "€")
    return any(answer in told for answer in answers)


@reward
def solved(trajectory: Any, environment: Any, orders: dict[str, Any], order: str, wish: str) -> dict[str, float]:
    """Return 1 if the final state is right and the customer was told what the policy demands, else 0."""
    needed = solution(orders, order, wish)[1]
    told = [message["content"] for message in trajectory.messages if message["role"] == "assistant"]
    said = float(any(needed in text.casefold() for text in told))
    return {"reward": environment.reward * said, "success": environment.reward * said, "said": said}
