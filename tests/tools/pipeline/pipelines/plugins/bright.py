from plugins import STEPS


def bright(image):
    return image.point(lambda value: min(255, value + 40))


STEPS.append(bright)
