"""Models and tokenizers, those that are made locally included.""" ""
