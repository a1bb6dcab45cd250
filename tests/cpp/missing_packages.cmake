# Configures the project with packages hidden: CMake must name their Debian packages, and no others.
# cmake -DSOURCE=<project> -DWORK=<scratch> -P missing_packages.cmake
cmake_minimum_required(VERSION 3.25)
set(all libhwy-dev nlohmann-json3-dev libcli11-dev libgtest-dev zlib1g-dev)

# configure(expected options...): expected packages with commas, or "none".
function(configure expected)
  file(REMOVE_RECURSE "${WORK}")
  execute_process(COMMAND "${CMAKE_COMMAND}" -S "${SOURCE}" -B "${WORK}" -DNYBBLE_CUDA=OFF -DNYBBLE_TORCH=OFF ${ARGN}
                  RESULT_VARIABLE status OUTPUT_VARIABLE output ERROR_VARIABLE output)
  string(REPLACE "," ";" expected "${expected}")
  foreach(package ${all})
    string(FIND "${output}" "${package}" at)
    if(package IN_LIST expected AND (at EQUAL -1 OR status EQUAL 0))
      message(FATAL_ERROR "${package} was hidden (${ARGN}) and not named: ${output}")
    elseif(NOT package IN_LIST expected AND NOT at EQUAL -1)
      message(FATAL_ERROR "${package} is named, but was not hidden (${ARGN}): ${output}")
    endif()
  endforeach()
  if(expected STREQUAL "none" AND NOT status EQUAL 0)
    message(FATAL_ERROR "nothing was hidden, and it failed: ${output}")
  endif()
  message(STATUS "${ARGN}: ${expected}")
endfunction()

configure(none)
configure(nlohmann-json3-dev -DCMAKE_DISABLE_FIND_PACKAGE_nlohmann_json=ON)
configure(libgtest-dev,zlib1g-dev -DCMAKE_DISABLE_FIND_PACKAGE_GTest=ON -DCMAKE_DISABLE_FIND_PACKAGE_ZLIB=ON)
configure(none -DNYBBLE_TESTS=OFF -DCMAKE_DISABLE_FIND_PACKAGE_GTest=ON -DCMAKE_DISABLE_FIND_PACKAGE_ZLIB=ON)
configure(libhwy-dev,libcli11-dev -DNYBBLE_TESTS=OFF -DCMAKE_IGNORE_PATH=/usr/include)

file(READ "${SOURCE}/README.md" readme)
foreach(package ${all})
  string(FIND "${readme}" "${package}" at)
  if(at EQUAL -1)
    message(FATAL_ERROR "README.md does not list ${package}")
  endif()
endforeach()
