"""The prebuilt tools, by their names in a recipe's `tools:` and `module:`."""

PREBUILT = {
    "alfworld": "agentfactory.tools.alfworld.environment:AlfWorld",
    "browse": "agentfactory.tools.web.browse:Browse",
    "calculator": "agentfactory.tools.calculator:calculator",
    "code_interpreter": "agentfactory.tools.code_interpreter:CodeInterpreter",
    "harbor": "agentfactory.tools.harbor.environment:Harbor",
    "image_interpreter": "agentfactory.tools.images.image_interpreter:ImageInterpreter",
    "image_tools": "agentfactory.tools.images.image_tools:ImageTools",
    "marked_screen": "agentfactory.tools.screens.screen:MarkedScreen",
    "scienceworld": "agentfactory.tools.scienceworld.environment:ScienceWorld",
    "screen": "agentfactory.tools.screens.screen:Screen",
    "search": "agentfactory.tools.search.search:Search",
    "shell": "agentfactory.tools.shell:Shell",
    "webshop": "agentfactory.tools.webshop.environment:WebShop",
}
"""Name -> `package.module:NAME`, loaded on first use."""
