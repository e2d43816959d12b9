"""The inference server: one app, several engines.""" ""
