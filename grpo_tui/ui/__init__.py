"""The Textual screen: the only room that imports Textual."""
