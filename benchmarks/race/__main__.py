"""python benchmarks/race"""

from race import main

main()
