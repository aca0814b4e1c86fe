# Toolchain for 64-bit ARM from Debian's packages g++-aarch64-linux-gnu, qemu-user and googletest (sources).
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_C_COMPILER aarch64-linux-gnu-gcc)
set(CMAKE_CXX_COMPILER aarch64-linux-gnu-g++)

# An early processor without extensions, so that code which needs more than the architecture promises is caught.
set(CMAKE_CROSSCOMPILING_EMULATOR qemu-aarch64;-cpu;cortex-a53;-L;/usr/aarch64-linux-gnu)

# Of these only headers are used, which are the same for every processor; they lie in this machine's package folders.
foreach(package hwy fmt)
  file(GLOB folders /usr/lib/*/cmake/${package})
  if(NOT folders)
    message(FATAL_ERROR "[cmake] lib${package}-dev must be installed, but there is no /usr/lib/*/cmake/${package}. "
      "Run script/bootstrap arm64, which installs it.")
  endif()
  list(GET folders 0 ${package}_DIR)
endforeach()
set(BLOCKCP_GOOGLETEST /usr/src/googletest)
