# What another project needs: headers, static libraries and find_package(blockcp), which gives blockcp::blockcp.
include(CMakePackageConfigHelpers)
include(GNUInstallDirs)

set(parts base schedule plan kernels transport engine)
foreach(part ${parts})
  set_target_properties(blockcp_${part} PROPERTIES EXPORT_NAME ${part})
  install(TARGETS blockcp_${part} EXPORT blockcpTargets ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT cpp)
endforeach()

add_library(blockcp_all INTERFACE)
set_target_properties(blockcp_all PROPERTIES EXPORT_NAME blockcp)
target_link_libraries(blockcp_all INTERFACE blockcp_engine blockcp_plan)
install(TARGETS blockcp_all EXPORT blockcpTargets)
if(TARGET blockcp_cli)
  install(TARGETS blockcp_cli RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR} COMPONENT cpp)
endif()

install(DIRECTORY ${PROJECT_SOURCE_DIR}/blockcp DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} COMPONENT cpp
  FILES_MATCHING PATTERN "*.h" PATTERN torch EXCLUDE)

set(config_folder ${CMAKE_INSTALL_LIBDIR}/cmake/blockcp)
install(EXPORT blockcpTargets NAMESPACE blockcp:: DESTINATION ${config_folder} COMPONENT cpp)
configure_package_config_file(${CMAKE_CURRENT_LIST_DIR}/blockcpConfig.cmake.in
  ${PROJECT_BINARY_DIR}/blockcpConfig.cmake INSTALL_DESTINATION ${config_folder})
write_basic_package_version_file(${PROJECT_BINARY_DIR}/blockcpConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/blockcpConfig.cmake ${PROJECT_BINARY_DIR}/blockcpConfigVersion.cmake
  DESTINATION ${config_folder} COMPONENT cpp)
