// What the command's exit status means (docs/command.md). Every code is produced by a test.
#pragma once

namespace nybble::cli {

enum ExitCode : int {
  kOk = 0,
  kFaults = 1,       // verify found faults
  kUsage = 2,        // the command line is wrong
  kBadInput = 3,     // a file or a value in it is not what it must be
  kSystem = 4,       // the operating system refused: no such file, no space, no permission
  kIncomplete = 5,   // an interrupted conversion: resume it
  kDestination = 6,  // the destination exists, or another process is writing it
  kUnsupported = 7,  // this build or this kind of model
  kInternal = 70,    // a fault of the command itself
};

}  // namespace nybble::cli
