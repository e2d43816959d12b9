"""Parts of the screens: `lines.py` is their base; `frame/` is around every screen, `main/` on the main one."""
