"""Everything that crosses a process, as types; each module says who writes it and who reads it.""" ""
