# Finds the headers and libraries of NYBBLE_PYTHON's torch without find_package(Torch), which would drag in a CUDA toolkit and
# flags of its own: NYBBLE_HAVE_TORCH, NYBBLE_TORCH_INCLUDE, NYBBLE_TORCH_LIB, NYBBLE_TORCH_VERSION.
set(NYBBLE_HAVE_TORCH OFF)
if(NOT NYBBLE_TORCH STREQUAL "OFF")
  execute_process(
    COMMAND "${NYBBLE_PYTHON}" -c
            "import importlib.util as u, pathlib, importlib.metadata as m; print(pathlib.Path(u.find_spec('torch').origin).parent, m.version('torch'), sep=';')"
    OUTPUT_VARIABLE found OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
  if(found)
    list(GET found 0 root)
    list(GET found 1 NYBBLE_TORCH_VERSION)
    set(NYBBLE_TORCH_INCLUDE "${root}/include")
    set(NYBBLE_TORCH_LIB "${root}/lib")
    set(NYBBLE_HAVE_TORCH ON)
    message(STATUS "Nybble: torch ${NYBBLE_TORCH_VERSION} (${root})")
  elseif(NYBBLE_TORCH STREQUAL "ON")
    message(FATAL_ERROR "NYBBLE_TORCH=ON, but ${NYBBLE_PYTHON} has no torch. Install torch 2.10 or newer there, or name another interpreter in NYBBLE_PYTHON.")
  else()
    message(STATUS "Nybble: no torch in ${NYBBLE_PYTHON}, the binding is left out")
  endif()
endif()
