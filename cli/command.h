// The subcommands. Each adds itself to the program; its return value is the exit code.
#pragma once

#include <CLI/CLI.hpp>

#include <functional>

namespace blockcp {

using Command = std::function<int()>;

Command add_doctor(CLI::App& program);
Command add_explain(CLI::App& program);
Command add_run(CLI::App& program);

}  // namespace blockcp
