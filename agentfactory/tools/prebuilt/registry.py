"""The prebuilt tools, by their names in a recipe's `tools:` and `module:`."""

PREBUILT = {
    "alfworld": "agentfactory.worlds.alfworld.alfworld:AlfWorld",
    "browse": "agentfactory.worlds.browse.browse:Browse",
    "calculator": "agentfactory.tools.prebuilt.calculator:calculator",
    "code_interpreter": "agentfactory.tools.prebuilt.code_interpreter:CodeInterpreter",
    "harbor": "agentfactory.worlds.harbor.harbor:Harbor",
    "image_interpreter": "agentfactory.worlds.images.image_interpreter:ImageInterpreter",
    "image_tools": "agentfactory.worlds.images.image_tools:ImageTools",
    "marked_screen": "agentfactory.worlds.screens.screen:MarkedScreen",
    "scienceworld": "agentfactory.worlds.scienceworld.scienceworld:ScienceWorld",
    "screen": "agentfactory.worlds.screens.screen:Screen",
    "search": "agentfactory.worlds.search.search:Search",
    "shell": "agentfactory.tools.prebuilt.shell:Shell",
    "webshop": "agentfactory.worlds.webshop.webshop:WebShop",
}
"""Name -> `package.module:NAME`, loaded on first use."""
