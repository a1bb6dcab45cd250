# What `cmake --install` and the wheel take.
# A wheel: the library, Highway and the command in nybble/_lib, and a `nybble` script that starts the command (binding/, cli/).
# A prefix: headers, the static library, the command, and find_package(nybble).
if(SKBUILD)
  return()
endif()
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)
set(folder "${CMAKE_INSTALL_LIBDIR}/cmake/nybble")

target_include_directories(nybble_core PUBLIC "$<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>")
set_target_properties(nybble_core PROPERTIES EXPORT_NAME core OUTPUT_NAME nybble_core)
install(TARGETS nybble_core EXPORT nybble ARCHIVE DESTINATION "${CMAKE_INSTALL_LIBDIR}")
install(TARGETS nybble RUNTIME DESTINATION "${CMAKE_INSTALL_BINDIR}")
if(NYBBLE_HWY_LIBRARY MATCHES "[.]so")
  install(FILES "$<TARGET_FILE_DIR:nybble>/libhwy.so.1" DESTINATION "${CMAKE_INSTALL_BINDIR}")
endif()
install(DIRECTORY include/nybble DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}")
install(EXPORT nybble NAMESPACE nybble:: DESTINATION "${folder}")
configure_package_config_file(cmake/nybble-config.cmake.in "${CMAKE_BINARY_DIR}/nybble-config.cmake" INSTALL_DESTINATION "${folder}")
write_basic_package_version_file("${CMAKE_BINARY_DIR}/nybble-config-version.cmake" COMPATIBILITY SameMinorVersion)
install(FILES "${CMAKE_BINARY_DIR}/nybble-config.cmake" "${CMAKE_BINARY_DIR}/nybble-config-version.cmake" DESTINATION "${folder}")
