/* A C compiler takes the header. */
#include "nybble/c_api.h"

int c_header_compiles_as_c(void) { return (int)sizeof(nybble_linear_call); }
