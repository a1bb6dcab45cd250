#pragma once
#include "simt/simt.h"
