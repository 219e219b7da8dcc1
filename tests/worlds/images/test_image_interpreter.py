"""Python on the images of a chain, in real sandboxes."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from agentfactory.worlds.images.image_interpreter import ImageInterpreter
from tests.worlds.opening import Open

pytestmark = pytest.mark.processes

PIXELS = np.random.default_rng(0).integers(0, 256, (70, 90, 3), dtype=np.uint8)
MIRROR = "from PIL import Image\npicture = Image.open('image_{}.png')\npicture.transpose(0).save('{}')\npicture.size"


@pytest.fixture
async def tools(tmp_path: Path, opened: Open) -> ImageInterpreter:
    made = opened(ImageInterpreter)
    Image.fromarray(PIXELS).save(path := tmp_path / "row.png")
    await made.reset([str(path)])
    return made


def shown(result: dict[str, Any]) -> np.ndarray:
    return np.asarray(result["observation"][-1])


async def test_images_are_files_and_saved_ones_get_numbers(tools: ImageInterpreter) -> None:
    result = await tools.python(MIRROR.format(0, "mirror.png"))
    assert result["observation"][:-1] == ["(90, 70)", "Image 1 (90 x 70 pixels):"]
    assert result["saved"] == {"mirror.png": 1}
    assert np.array_equal(shown(result), PIXELS[:, ::-1])
    # other tools can use this image, and Python can use theirs
    part = tools.zoom([10, 0, 50, 40], 1)
    assert (part["image"], part["of"]) == (2, 1)
    result = await tools.python(MIRROR.format(2, "mirror.png"))
    assert result["saved"] == {"mirror.png": 3}
    assert np.array_equal(shown(result), PIXELS[:40, ::-1][:, 10:50][:, ::-1])
    # nothing is shown twice
    assert await tools.python("picture.size") == {"observation": ["(40, 40)"]}
    assert (await tools.python("1 / 0"))["error"] == "ZeroDivisionError"


async def test_what_cannot_be_shown_is_told(tools: ImageInterpreter) -> None:
    code = "open('broken.png', 'w').write('no image')\nfrom PIL import Image\nfor n in range(9):\n"
    code += "    Image.new('RGB', (8, 8)).save(f'part{n}.png')\nimport os\n"
    code += "open('big.png', 'wb').write(os.urandom(40 << 20))"
    result = await tools.python(code)
    told = [part for part in result["observation"] if isinstance(part, str)]
    assert told[1] == "big.png is not shown: the images of a call may have 32 MiB."
    assert told[2].startswith("broken.png is not shown: the image is damaged")
    assert told[-1] == "part8.png is not shown: a call may show 8 images."
    assert result["saved"] == {f"part{n}.png": n + 1 for n in range(8)}


async def test_after_a_lost_sandbox_the_images_are_there_again(tools: ImageInterpreter) -> None:
    assert "was restarted" in (await tools.python("import os\nos.abort()"))["observation"][0]
    assert (await tools.python(MIRROR.format(0, "mirror.png")))["saved"] == {"mirror.png": 1}


async def test_the_next_chain_finds_its_own_images_only(tools: ImageInterpreter) -> None:
    await tools.python(MIRROR.format(0, "mirror.png"))
    await tools.release()
    await tools.reset([Image.fromarray(PIXELS[:20])])
    files = "import os\nsorted(name for name in os.listdir() if name[0] != '.')"
    assert await tools.python(files) == {"observation": ["['image_0.png']"]}
