"""gpujob: a file-watching, config-driven job scheduler for GPU servers.

How the house is laid out; arrows point at what is imported (docs/architecture.md, tests/test_house.py)::

    ┌──────────────────────────────────────────────┐
    │ faces    cli · front · web                   │  how it looks to people and programs
    └──────┬─────────────────────────────┬─────────┘
           │ asks                        │ starts
    ┌──────▼──────┐              ┌───────▼─────────┐
    │ desk        │              │ engine the loop │  what a caller may ask · what runs by itself
    └──┬──────┬───┘              └─┬─ uses all four below
    ┌──▼───┐┌─▼─────┐ ┌────────┐ ┌─▼───────┐
    │intake││ store │ │ probes │ │ runners │          hands and eyes: touch the world, decide nothing
    └──┬───┘└─┬─────┘ └───┬────┘ └─┬───────┘
    ┌──▼──────▼───────────▼────────▼───────┐
    │ core     what things are, what should happen   │ thinks, touches nothing
    └──────────────────────────────────────┘
"""

__version__ = "0.1.0"
