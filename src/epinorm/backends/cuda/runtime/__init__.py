"""From kernel text to a launch: compiler, driver, arguments."""
